"""The report on a monitored model: `GET /models/NAME/monitor`, and the input of its HTML page."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.core.comparison.quality import Metric


class ReportPart(BaseModel):
    """A part of a report, whose fields are described by the texts below them."""

    model_config = ConfigDict(use_attribute_docstrings=True, defer_build=True)


class Estimate(ReportPart):
    """A figure with its 95 % confidence interval."""

    value: float | None
    """null if there is nothing to count"""
    low: float | None = None
    high: float | None = None
    count: int
    """number of answers that the figure is based on"""


class ColumnHistogram(ReportPart):
    """The distribution of a column in the baseline and in the last windows."""

    edges: list[float] | None = None
    """inner edges of the bins of a number; null for categories"""
    categories: list[str] | None = None
    baseline: list[float]
    """share of the baseline's rows in each bin"""
    live: list[float]
    """share of the last window's rows in each bin"""
    previous: list[float] | None = None
    """share of the rows of the version before, if it is monitored"""


class HistoryPoint(ReportPart):
    at: float
    """seconds since 1970 of the end of the window or period"""
    value: float
    low: float | None = None
    high: float | None = None
    count: int = 0


class ColumnDrift(ReportPart):
    """The drift of one input or fact of the answer."""

    column: str
    kind: Literal["number", "category"]
    psi: float | None
    """population stability index; null without a baseline"""
    js: float | None
    """Jensen-Shannon distance, from 0 to 1"""
    test: Literal["ks", "chi2"] | None = None
    statistic: float | None = None
    p_value: float | None = None
    alarm: bool = False
    """whether the column has drifted, by the last window"""
    alarm_since: float | None = None
    """seconds since 1970"""
    missing: float = 0.0
    """share of the rows without a value"""
    baseline_missing: float | None = None
    previous_psi: float | None = None
    """compared with the version before"""
    previous_alarm: bool = False
    histogram: ColumnHistogram | None = None
    history: list[HistoryPoint] = []
    """index of each window, the newest last"""


class ClassQuality(ReportPart):
    label: str
    precision: Estimate
    recall: Estimate


class CalibrationBin(ReportPart):
    confidence: float
    """mean confidence of the answers in the bin"""
    accuracy: Estimate


class Quality(ReportPart):
    """How good the answers are whose truth is known."""

    answers: int
    """number of answers with a known truth"""
    accuracy: Estimate | None = None
    """null if the answers are numbers"""
    classes: list[ClassQuality] = []
    """the most frequent 100 classes"""
    hidden_classes: int = 0
    """number of the other classes"""
    calibration: list[CalibrationBin] = []
    calibration_error: float | None = None
    """mean difference of confidence and accuracy (ECE)"""
    mean_error: Estimate | None = None
    """mean absolute error of numbers"""
    root_mean_square_error: float | None = None
    history: list[HistoryPoint] = []
    """accuracy or mean absolute error by day or hour, the newest last"""


class GroupFigures(ReportPart):
    """The figures of one group of an attribute."""

    group: str
    count: int
    selection_rate: Estimate | None = None
    """share of answers with the favourable class"""
    error: Estimate | None = None
    """share of wrong answers, or mean error"""
    false_positives: Estimate | None = None
    """share of the truly unfavourable that got the favourable class"""
    false_negatives: Estimate | None = None
    confidence: float | None = None


DifferenceName = Literal["demographic_parity", "equal_opportunity", "equalized_odds", "error"]


class GroupDifference(ReportPart):
    """A difference that a fairness review asks for."""

    name: DifferenceName
    difference: Estimate
    """largest difference between two groups"""
    groups: tuple[str, str]
    """the group with the larger, and the smaller figure"""


class AttributeGroups(ReportPart):
    """The groups of one attribute."""

    attribute: str
    positive: str | None
    groups: list[GroupFigures]
    hidden: int = 0
    """number of groups that are too small to be shown"""
    differences: list[GroupDifference] = []


class VersionReport(ReportPart):
    version: str
    baseline: Literal["archive", "first window", "none"] = "none"
    baseline_rows: int = 0
    problem: str | None = None
    """why something is not computed"""
    first: float | None = None
    """seconds since 1970 of the first sample"""
    last: float | None = None
    samples: int = 0
    windows: int = 0
    window_samples: int = 0
    """samples of the window that is not complete"""
    drift: float | None = None
    """largest population stability index in the last window"""
    alarm: bool = False
    columns: list[ColumnDrift] = []
    quality: Quality | None = None
    groups: list[AttributeGroups] = []


class VersionComparison(ReportPart):
    """The comparison of two versions by the truth that clients have reported."""

    metric: Metric
    old: str
    new: str
    difference: Estimate
    """of the new and the old version; its interval may be read at any time"""
    better: str | None = None
    """the better version, or null without a decision"""
    needed: int | None = None
    """estimate of the answers per version that a decision still needs"""
    sentence: str
    """the result, for people"""


class MonitorReport(ReportPart):
    model: str
    monitoring: bool
    config: MonitorConfig | None = None
    samples: int = 0
    """samples since the server was started"""
    dropped: dict[str, int] = {}
    """samples that were not examined, stored or sent, by reason"""
    problem: str | None = None
    versions: list[VersionReport] = []
    """the newest first"""
    comparisons: list[VersionComparison] = []
    contests: int = 0
    """contested answers that nobody has answered"""


class FeedbackError(ReportPart):
    index: int
    """position in the list, from 0"""
    code: Literal["unknown_request", "wrong_type", "conflict", "future", "version_gone", "invalid"]
    message: str


class FeedbackResult(ReportPart):
    """The answer to `POST /feedback/NAME`."""

    accepted: int
    """items that were stored now"""
    duplicates: int = 0
    """items that were stored before"""
    errors: list[FeedbackError] = []


class Contest(ReportPart):
    """An answer that a person has contested."""

    id: str
    model: str
    version: str
    request_id: str
    at: float
    """seconds since 1970 of the contest"""
    answered_at: float | None = None
    """when a person has answered the contest"""
    reason: str
    prediction: str | float | None
    state: Literal["open", "upheld", "corrected"]
    response: str = ""
    """what the person has answered"""
    truth: str | float | None = None
    """the right answer, if it was corrected"""
