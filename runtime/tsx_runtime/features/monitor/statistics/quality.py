"""The quality of a version's answers, from counts of answers whose truth is known."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

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


class ErrorSum(NamedTuple):
    """The sums of the absolute errors of one hour's answers, which are numbers."""

    period: float  # start of the hour, in seconds since 1970
    answers: int
    total: float
    squares: float  # sum of the squared errors


Entry = TypeVar("Entry", OutcomeCount, ErrorSum)


def accuracy_counts(outcomes: Sequence[OutcomeCount]) -> MetricCounts:
    """Return the counts of right answers, for a comparison of versions."""
    hits = sum(outcome.answers for outcome in outcomes if outcome.prediction == outcome.truth)
    return MetricCounts(sum(outcome.answers for outcome in outcomes), hits, hits)


def error_counts(errors: Sequence[ErrorSum]) -> MetricCounts:
    """Return the sums of absolute errors, for a comparison of versions."""
    _, counts, totals, squares = zip(*errors, strict=True) if errors else ((), (), (), ())
    return MetricCounts(sum(counts), sum(totals), sum(squares))


def estimate_share(hits: float, count: int) -> Estimate:
    """Return a share with Wilson's 95 % interval."""
    if not count:
        return Estimate(value=None, count=0)
    low, high = wilson_interval(round(hits), count)
    return Estimate(value=hits / count, low=low, high=high, count=count)


def estimate_mean(counts: MetricCounts) -> Estimate:
    """Return a mean with the 95 % interval of Student's t distribution."""
    count, mean = counts.count, counts.mean
    if count < 2:
        return Estimate(value=mean if count else None, count=count)
    variance = max(0.0, counts.squares / count - mean**2) / (count - 1)
    radius = float(stdtrit(count - 1, 0.975)) * math.sqrt(variance)
    return Estimate(value=mean, low=max(0.0, mean - radius), high=mean + radius, count=count)


def estimate_accuracy(outcomes: Sequence[OutcomeCount]) -> Estimate:
    counts = accuracy_counts(outcomes)
    return estimate_share(counts.total, counts.count)


def quality_of(outcomes: Iterable[OutcomeCount], errors: Iterable[ErrorSum]) -> Quality | None:
    """Return the quality of answers with classes and with numbers; None without a known truth."""
    outcomes = [outcome for outcome in outcomes if outcome.answers]
    errors = [error for error in errors if error.answers]
    if not outcomes and not errors:
        return None
    accuracy, error = estimate_accuracy(outcomes), error_counts(errors)
    calibration, calibration_error = _calibration(outcomes)
    classes = _classes(outcomes)
    return Quality(
        answers=accuracy.count + error.count,
        accuracy=accuracy if outcomes else None,
        classes=classes[:MAX_CLASSES],
        hidden_classes=max(0, len(classes) - MAX_CLASSES),
        calibration=calibration,
        calibration_error=calibration_error,
        mean_error=estimate_mean(error) if errors else None,
        root_mean_square_error=math.sqrt(error.squares / error.count) if errors else None,
        history=(
            _history(outcomes, estimate_accuracy)
            if outcomes
            else _history(errors, lambda members: estimate_mean(error_counts(members)))
        ),
    )


def _classes(outcomes: Sequence[OutcomeCount]) -> list[ClassQuality]:
    """Return precision and recall of each class, the most frequent true class first."""
    predicted, true, right = Counter[str](), Counter[str](), Counter[str]()
    for outcome in outcomes:
        predicted[outcome.prediction] += outcome.answers
        true[outcome.truth] += outcome.answers
        if outcome.prediction == outcome.truth:
            right[outcome.truth] += outcome.answers
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
    bins = defaultdict[int, list[OutcomeCount]](list)
    for outcome in outcomes:
        if outcome.bin >= 0:
            bins[outcome.bin].append(outcome)
    calibration, total, distance = [], 0, 0.0
    for _, members in sorted(bins.items()):
        counts = accuracy_counts(members)
        confidence = sum(outcome.confidence for outcome in members)
        total += counts.count
        distance += abs(counts.total - confidence)
        calibration.append(
            CalibrationBin(
                confidence=confidence / counts.count, accuracy=estimate_accuracy(members)
            )
        )
    return calibration, distance / total if total else None


def _history(
    entries: Sequence[Entry], estimate: Callable[[list[Entry]], Estimate]
) -> list[HistoryPoint]:
    """Return the estimates of hours, or of days (UTC) if the entries span more than a week."""
    periods = [entry.period for entry in entries]
    length = DAY_S if max(periods) - min(periods) > MAX_HOURLY_SPAN_S else HOUR_S
    members = defaultdict[float, list[Entry]](list)
    for entry in entries:
        members[(entry.period // length + 1) * length].append(entry)
    return [HistoryPoint(at=end, **estimate(members[end]).model_dump()) for end in sorted(members)]
