"""The comparison of both versions' quality in a rollout, as pure functions.

The metric of the new version may be worse by at most a margin. Its intervals hold at all times
together (core/comparison/means.py), so a rollout may read them at each observation:

- The metric is kept if the interval of the difference excludes everything beyond the margin.
- The metric is worse if the interval excludes 0 and better values, unless the metric is kept.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, Field

from tsx_runtime.core.comparison.means import (
    MIN_COUNT,
    SCALE,
    MetricCounts,
    compare_means,
    error_scale,
    needed_answers,
    round_count,
)
from tsx_runtime.core.comparison.quality import RELEVANT_DIFFERENCES, Metric
from tsx_runtime.core.comparison.significance import Z_95, wilson_interval

MIN_SCALE = 1e-4  # No test is tuned to a smaller margin.


class MetricValue(BaseModel):
    """A metric of one version, or its difference, with the 95 % interval."""

    value: float | None = Field(description="null if no truth is known")
    low: float | None = None
    high: float | None = None
    answers: int = Field(description="number of answers with a known truth")


class MetricComparison(BaseModel):
    """The metric of both versions since the rollout began."""

    metric: Metric
    margin: float = Field(description="how much worse the new version may be, in its unit")
    new: MetricValue
    old: MetricValue
    difference: MetricValue = Field(description="new minus old; it may be read at any time")
    needed: int | None = Field(
        None, description="estimate of the answers per version that a decision still needs"
    )
    verdict: Literal["kept", "worse", "unclear"]
    reason: str


def compare_metric(
    metric: Metric,
    margin: float | None,
    new: tuple[str, MetricCounts],
    old: tuple[str, MetricCounts],
    *,
    old_grows: bool,
) -> MetricComparison:
    """Compare a metric of the new and the old version, given by their names and counts.

    Args:
        metric: The metric.
        margin: How much worse the new version may be: an accuracy, or a part of the old mean error.
        new: The new version.
        old: The old version.
        old_grows: Whether the old version still gets answers.
    """
    (new_name, new_counts), (old_name, old_counts) = new, old
    is_accuracy = metric == "accuracy"
    limit = RELEVANT_DIFFERENCES[metric] if margin is None else margin
    if not is_accuracy:
        limit *= old_counts.mean
    scale = (
        (limit if limit > MIN_SCALE else SCALE)
        if is_accuracy
        else error_scale(new_counts, old_counts)
    )
    value, low, high = compare_means(new_counts, old_counts, scale=scale)
    # The gain is positive if the new version is better.
    gain, worst, best = (value, low, high) if is_accuracy else (-value, -high, -low)
    answers = min(new_counts.count, old_counts.count)
    verdict: Literal["kept", "worse", "unclear"] = "unclear"
    needed = None
    name = metric.replace("_", " ")

    def text(number: float) -> str:
        return f"{number:.1%}" if is_accuracy else f"{number:.3g}"

    means = (
        f"{name} {text(new_counts.mean)} of version {new_name} and {text(old_counts.mean)} of"
        f" version {old_name}"
    )
    if answers < MIN_COUNT:
        needed = MIN_COUNT - answers
        reason = (
            f"the truth is known of {new_counts.count} answers of version {new_name} and of"
            f" {old_counts.count} of version {old_name} since the rollout began, and the"
            f" {name} needs {MIN_COUNT} of each: POST /feedback/MODEL"
        )
    elif worst >= -limit:
        verdict, reason = "kept", means
    elif best < 0:
        verdict, reason = "worse", f"{means}, a difference of {text(low)} to {text(high)}"
    else:
        needed = needed_answers(
            new_counts, old_counts, max(gain + limit, -gain), scale=scale, old_grows=old_grows
        )
        versions = "each version" if old_grows else f"version {new_name}"
        reason = (
            f"{means}; about {round_count(needed):,} more answers of {versions} with a known truth"
            f" decide whether it is at most {text(limit)} worse"
        )
    return MetricComparison(
        metric=metric,
        margin=limit,
        new=_value(new_counts, is_accuracy=is_accuracy),
        old=_value(old_counts, is_accuracy=is_accuracy),
        difference=MetricValue(
            value=value if answers else None,
            low=low if math.isfinite(low) else None,
            high=high if math.isfinite(high) else None,
            answers=answers,
        ),
        needed=needed,
        verdict=verdict,
        reason=reason,
    )


def _value(counts: MetricCounts, *, is_accuracy: bool) -> MetricValue:
    count, mean = counts.count, counts.mean
    if not count:
        return MetricValue(value=None, answers=0)
    if is_accuracy:
        low, high = wilson_interval(round(counts.total), count)
    else:
        radius = Z_95 * math.sqrt(counts.variance / count)
        low, high = max(0.0, mean - radius), mean + radius
    return MetricValue(value=mean, low=low, high=high, answers=count)
