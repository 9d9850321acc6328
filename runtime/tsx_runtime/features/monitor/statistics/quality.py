"""The quality of a version's answers, from counts of answers whose truth is known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from scipy.special import stdtrit

from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.core.comparison.significance import wilson_interval
from tsx_runtime.features.monitor.report import (
    CalibrationBin,
    ClassQuality,
    Estimate,
    HistoryPoint,
    Quality,
)

MAX_CLASSES = 100
HOUR_S, DAY_S = 3600.0, 86400.0
MAX_HOURLY_SPAN_S = 7 * DAY_S  # A longer history has a point for each day.


class OutcomeCount(NamedTuple):
    """The number of answers of one hour with the same class, truth and confidence decile."""

    period: float  # start of the hour, in seconds since 1970
    prediction: str
    truth: str
    bin: int  # decile of the confidence, 0 to 9; -1 for answers without one
    answers: int
    confidence: float  # sum of the confidences

    @property
    def total(self) -> int:
        """The number of right answers."""
        return self.answers if self.prediction == self.truth else 0

    @property
    def squares(self) -> int:
        return self.total


class ErrorSum(NamedTuple):
    """The sums of the absolute errors of one hour's answers, which are numbers."""

    period: float  # start of the hour, in seconds since 1970
    answers: int
    total: float
    squares: float  # sum of the squared errors


Entry = OutcomeCount | ErrorSum


def sum_counts(entries: Iterable[Entry]) -> MetricCounts:
    """Return the sums of right answers, or of errors."""
    rows: Any = ((entry.answers, entry.total, entry.squares) for entry in entries)
    return MetricCounts(*map(sum, zip(*rows, strict=True)))


def estimate(counts: MetricCounts) -> Estimate:
    """Return a mean with its 95 % interval: Wilson's for shares, else that of Student's t."""
    count, value = counts.count, counts.mean
    if not count:
        return Estimate(value=None, count=0)
    if counts.squares == counts.total:  # Each value is 0 or 1.
        low, high = wilson_interval(round(counts.total), count)
    elif count == 1:
        return Estimate(value=value, count=1)
    else:
        variance = max(0.0, counts.squares / count - value**2) / (count - 1)
        radius = float(stdtrit(count - 1, 0.975)) * math.sqrt(variance)
        low, high = max(0.0, value - radius), value + radius
    return Estimate(value=value, low=low, high=high, count=count)


def estimate_share(hits: int, count: int) -> Estimate:
    return estimate(MetricCounts(count, hits, hits))


def quality_of(outcomes: Sequence[OutcomeCount], errors: Sequence[ErrorSum]) -> Quality | None:
    """Return the quality of answers with classes and with numbers; None without a known truth."""
    if not outcomes and not errors:
        return None
    accuracy, error = sum_counts(outcomes), sum_counts(errors)
    calibration, calibration_error = _calibration(outcomes)
    classes = _classes(outcomes)
    return Quality(
        answers=accuracy.count + error.count,
        accuracy=estimate(accuracy) if outcomes else None,
        classes=classes[:MAX_CLASSES],
        hidden_classes=len(classes[MAX_CLASSES:]),
        calibration=calibration,
        calibration_error=calibration_error,
        mean_error=estimate(error) if errors else None,
        root_mean_square_error=math.sqrt(error.squares / error.count) if errors else None,
        history=_history(outcomes or errors),
    )


def _classes(outcomes: Sequence[OutcomeCount]) -> list[ClassQuality]:
    """Return precision and recall of each class, the most frequent true class first."""
    predicted, true, right = Counter[str](), Counter[str](), Counter[str]()
    for outcome in outcomes:
        predicted[outcome.prediction] += outcome.answers
        true[outcome.truth] += outcome.answers
        right[outcome.truth] += outcome.total
    return [
        ClassQuality(
            label=label,
            precision=estimate_share(right[label], predicted[label]),
            recall=estimate_share(right[label], true[label]),
        )
        for label in sorted(predicted | true, key=lambda label: (-true[label], label))
    ]


def _calibration(outcomes: Sequence[OutcomeCount]) -> tuple[list[CalibrationBin], float | None]:
    """Return the bins of confidence, and the expected calibration error.

    It is the mean of the bins' |accuracy - confidence|, weighted by answers (Guo et al.: On
    Calibration of Modern Neural Networks, 2017).
    """
    bins, total, distance = [], 0, 0.0
    decile = attrgetter("bin")
    for number, group in groupby(sorted(outcomes, key=decile), decile):
        members = list(group)
        if number >= 0:
            counts = sum_counts(members)
            confidence = sum(outcome.confidence for outcome in members)
            total += counts.count
            distance += abs(counts.total - confidence)
            bins.append(
                CalibrationBin(confidence=confidence / counts.count, accuracy=estimate(counts))
            )
    return bins, distance / total if total else None


def _history(entries: Sequence[Entry]) -> list[HistoryPoint]:
    """Return the estimates of hours, or of days (UTC) if the entries span more than a week."""
    periods = [entry.period for entry in entries]
    length = DAY_S if max(periods) - min(periods) > MAX_HOURLY_SPAN_S else HOUR_S

    def end_of(entry: Entry) -> float:
        return (entry.period // length + 1) * length

    return [
        HistoryPoint(at=end, **estimate(sum_counts(members)).model_dump())
        for end, members in groupby(sorted(entries, key=end_of), end_of)
    ]
