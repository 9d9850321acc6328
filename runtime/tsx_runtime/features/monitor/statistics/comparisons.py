"""The comparison of two versions by the truth: which is better, by how much, and how sure."""

from __future__ import annotations

import math

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
from tsx_runtime.features.monitor.report import Estimate, VersionComparison


def compare_versions(
    old: str, new: str, metric: Metric, old_counts: MetricCounts, new_counts: MetricCounts
) -> VersionComparison:
    """Compare two versions by answers of the same time.

    The test ends when its interval excludes 0, or all relevant differences. The interval holds at
    all times together, so the test may be read after each answer.
    """
    is_accuracy = metric == "accuracy"
    scale = SCALE if is_accuracy else error_scale(new_counts, old_counts)
    relevant = RELEVANT_DIFFERENCES[metric] * (1.0 if is_accuracy else old_counts.mean)
    value, low, high = compare_means(new_counts, old_counts, scale=scale)
    count = min(new_counts.count, old_counts.count)
    interval = {"low": low, "high": high} if count >= MIN_COUNT else {}
    better = needed = None

    def text(number: float) -> str:
        return f"{100 * number:.1f}" if is_accuracy else f"{number:.3g}"

    name, order, points, percent = (
        ("accuracy", "higher", " points", " %") if is_accuracy else ("mean error", "lower", "", "")
    )
    means = [text(counts.mean) + percent for counts in (new_counts, old_counts)]
    if count < MIN_COUNT:
        needed = MIN_COUNT - count
        sentence = (
            f"No decision yet: of version {new if new_counts.count == count else old},"
            f" {count} answers have a known truth; at least {MIN_COUNT} are needed."
        )
    elif low > 0 or high < 0:
        better = new if (value > 0) == is_accuracy else old
        ends = sorted((abs(low), abs(high)))
        sentence = (
            f"Version {better} is better: its {name} is {text(abs(value))}{points} {order}"
            f" ({' against '.join(means if better == new else means[::-1])}; 95 % interval"
            f" {text(ends[0])} to {text(ends[1])}, valid at any time)."
        )
    elif (bound := max(-low, high)) <= relevant:
        if is_accuracy:
            bound = math.ceil(1000 * bound) / 1000
        sentence = f"No decision: the versions differ by at most {text(bound)}{points}."
    else:
        needed = needed_answers(
            new_counts, old_counts, max(abs(value), relevant - abs(value)), scale=scale
        )
        sentence = (
            f"No decision yet: the {name} of version {new} is {means[0]}, that of version {old}"
            f" {means[1]}. About {round_count(needed):,} more answers of each version with a known"
            " truth are needed."
        )
    return VersionComparison(
        metric=metric,
        old=old,
        new=new,
        difference=Estimate(value=value if count else None, count=count, **interval),
        better=better,
        needed=needed,
        sentence=sentence,
    )
