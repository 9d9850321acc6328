"""The report on a monitored model: `GET /models/NAME/monitor`, and the input of its HTML page."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.core.comparison.quality import Metric


class Estimate(BaseModel):
    """A figure with its 95 % confidence interval."""

    value: float | None = Field(description="null if there is nothing to count")
    low: float | None = None
    high: float | None = None
    count: int = Field(description="number of answers that the figure is based on")


class ColumnHistogram(BaseModel):
    """The distribution of a column in the baseline and in the last windows."""

    edges: list[float] | None = Field(
        default=None, description="inner edges of the bins of a number; null for categories"
    )
    categories: list[str] | None = None
    baseline: list[float] = Field(description="share of the baseline's rows in each bin")
    live: list[float] = Field(description="share of the last window's rows in each bin")
    previous: list[float] | None = Field(
        default=None, description="share of the rows of the version before, if it is monitored"
    )


class HistoryPoint(BaseModel):
    at: float = Field(description="seconds since 1970 of the end of the window or period")
    value: float
    low: float | None = None
    high: float | None = None
    count: int = 0


class ColumnDrift(BaseModel):
    """The drift of one input or fact of the answer."""

    column: str
    kind: Literal["number", "category"]
    psi: float | None = Field(description="population stability index; null without a baseline")
    js: float | None = Field(description="Jensen-Shannon distance, from 0 to 1")
    test: Literal["ks", "chi2"] | None = None
    statistic: float | None = None
    p_value: float | None = None
    alarm: bool = Field(
        default=False, description="whether the column has drifted, by the last window"
    )
    alarm_since: float | None = Field(default=None, description="seconds since 1970")
    missing: float = Field(default=0.0, description="share of the rows without a value")
    baseline_missing: float | None = None
    previous_psi: float | None = Field(default=None, description="compared with the version before")
    previous_alarm: bool = False
    histogram: ColumnHistogram | None = None
    history: list[HistoryPoint] = Field(
        default=[], description="index of each window, the newest last"
    )


class ClassQuality(BaseModel):
    label: str
    precision: Estimate
    recall: Estimate


class CalibrationBin(BaseModel):
    confidence: float = Field(description="mean confidence of the answers in the bin")
    accuracy: Estimate


class Quality(BaseModel):
    """How good the answers are whose truth is known."""

    answers: int = Field(description="number of answers with a known truth")
    accuracy: Estimate | None = Field(None, description="null if the answers are numbers")
    classes: list[ClassQuality] = Field([], description="the most frequent 100 classes")
    hidden_classes: int = Field(0, description="number of the other classes")
    calibration: list[CalibrationBin] = []
    calibration_error: float | None = Field(
        None, description="mean difference of confidence and accuracy (ECE)"
    )
    mean_error: Estimate | None = Field(None, description="mean absolute error of numbers")
    root_mean_square_error: float | None = None
    history: list[HistoryPoint] = Field(
        [], description="accuracy or mean absolute error by day or hour, the newest last"
    )


class GroupFigures(BaseModel):
    """The figures of one group of an attribute."""

    group: str
    count: int
    selection_rate: Estimate | None = Field(
        None, description="share of answers with the favourable class"
    )
    error: Estimate | None = Field(None, description="share of wrong answers, or mean error")
    false_positives: Estimate | None = Field(
        None, description="share of the truly unfavourable that got the favourable class"
    )
    false_negatives: Estimate | None = None
    confidence: float | None = None


DifferenceName = Literal["demographic_parity", "equal_opportunity", "equalized_odds", "error"]


class GroupDifference(BaseModel):
    """A difference that a fairness review asks for."""

    name: DifferenceName
    difference: Estimate = Field(description="largest difference between two groups")
    groups: tuple[str, str] = Field(description="the group with the larger, and the smaller figure")


class AttributeGroups(BaseModel):
    """The groups of one attribute."""

    attribute: str
    positive: str | None
    groups: list[GroupFigures]
    hidden: int = Field(0, description="number of groups that are too small to be shown")
    differences: list[GroupDifference] = []


class VersionReport(BaseModel):
    version: str
    baseline: Literal["archive", "first window", "none"] = "none"
    baseline_rows: int = 0
    problem: str | None = Field(None, description="why something is not computed")
    first: float | None = Field(None, description="seconds since 1970 of the first sample")
    last: float | None = None
    samples: int = 0
    windows: int = 0
    window_samples: int = Field(0, description="samples of the window that is not complete")
    drift: float | None = Field(
        None, description="largest population stability index in the last window"
    )
    alarm: bool = False
    columns: list[ColumnDrift] = []
    quality: Quality | None = None
    groups: list[AttributeGroups] = []


class VersionComparison(BaseModel):
    """The comparison of two versions by the truth that clients have reported."""

    metric: Metric
    old: str
    new: str
    difference: Estimate = Field(
        description="of the new and the old version; its interval may be read at any time"
    )
    better: str | None = Field(None, description="the better version, or null without a decision")
    needed: int | None = Field(
        None, description="estimate of the answers per version that a decision still needs"
    )
    sentence: str = Field(description="the result, for people")


class MonitorReport(BaseModel):
    model: str
    monitoring: bool
    config: MonitorConfig | None = None
    samples: int = Field(0, description="samples since the server was started")
    dropped: dict[str, int] = Field(
        {}, description="samples that were not examined, stored or sent, by reason"
    )
    problem: str | None = None
    versions: list[VersionReport] = Field([], description="the newest first")
    comparisons: list[VersionComparison] = []
    contests: int = Field(0, description="contested answers that nobody has answered")


class FeedbackError(BaseModel):
    index: int = Field(description="position in the list, from 0")
    code: Literal["unknown_request", "wrong_type", "conflict", "future", "version_gone", "invalid"]
    message: str


class FeedbackResult(BaseModel):
    """The answer to `POST /feedback/NAME`."""

    accepted: int = Field(description="items that were stored now")
    duplicates: int = Field(0, description="items that were stored before")
    errors: list[FeedbackError] = []


class Contest(BaseModel):
    """An answer that a person has contested."""

    id: str
    model: str
    version: str
    request_id: str
    at: float = Field(description="seconds since 1970 of the contest")
    answered_at: float | None = Field(None, description="when a person has answered the contest")
    reason: str
    prediction: str | float | None
    state: Literal["open", "upheld", "corrected"]
    response: str = Field("", description="what the person has answered")
    truth: str | float | None = Field(None, description="the right answer, if it was corrected")
