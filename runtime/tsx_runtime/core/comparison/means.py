"""The difference of two means, with an interval that stays valid however often it is read.

The interval is a normal mixture confidence sequence (Johari, Pekelis, Walsh: Always Valid
Inference, 2015; Waudby-Smith et al.: Time-uniform central limit theory, 2021). It holds at all
times together with the probability 1 - alpha, so a test may end as soon as it excludes 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

ALPHA = 0.05  # probability that an interval ever excludes the true difference
SCALE = 0.02  # the difference of rates to which the mixture is tuned
MIN_COUNT = 30  # With fewer values, the normal distribution is not a good approximation.
MAX_NEEDED = 10_000_000


@dataclass(frozen=True)
class MetricCounts:
    """The sums of a metric over answers, such as of 0 and 1 for the accuracy."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """The variance; for rates, half a right and half a wrong answer are added.

        Without them, the variance of a version without a wrong answer would be zero.
        """
        total, squares, count = self.total, self.squares, self.count
        if squares == total:  # Each value is 0 or 1.
            total, squares, count = total + 0.5, squares + 0.5, count + 1
        return max(0.0, squares / count - (total / count) ** 2)


def compare_means(
    new: MetricCounts, old: MetricCounts, *, scale: float = SCALE
) -> tuple[float, float, float]:
    """Return the difference `new - old` of two means, and its interval, valid at any time.

    Args:
        new: The counts of the new version.
        old: The counts of the old version.
        scale: The difference for which the interval becomes narrow soonest, in units of the metric.
    """
    value = new.mean - old.mean
    if min(new.count, old.count) < MIN_COUNT:
        return value, -math.inf, math.inf
    variance = new.variance / new.count + old.variance / old.count
    radius = _radius(variance, scale)
    return value, value - radius, value + radius


def error_scale(new: MetricCounts, old: MetricCounts) -> float:
    """Return a scale for means of errors: a tenth of the pooled standard deviation.

    For rates of 95 %, `SCALE` is as large a part of it.
    """
    count = new.count + old.count
    pooled = MetricCounts(count, new.total + old.total, new.squares + old.squares)
    return math.sqrt(pooled.variance) / 10 if count else SCALE


def needed_answers(
    new: MetricCounts,
    old: MetricCounts,
    difference: float,
    *,
    scale: float = SCALE,
    old_grows: bool = True,
) -> int:
    """Estimate how many more answers of each version narrow the interval to +- `difference`.

    The result is at most `MAX_NEEDED`. If not `old_grows`, only the new version gets answers.
    """

    def is_enough(more: int) -> bool:
        new_count = new.count + more
        old_count = old.count + (more if old_grows else 0)
        if min(new_count, old_count) < MIN_COUNT:
            return False
        variance = new.variance / new_count + old.variance / old_count
        return _radius(variance, scale) <= difference

    return bisect_left(range(MAX_NEEDED), True, key=is_enough)


def round_count(count: int) -> int:
    """Round an estimated count to two significant digits."""
    return int(float(f"{count:.2g}"))


def _radius(variance: float, scale: float) -> float:
    """Return the half width for a difference whose estimate has this variance."""
    if not variance:  # All values of each version are the same.
        return 0.0
    information = scale**2 / variance
    return math.sqrt(variance * (1 + 1 / information) * math.log((1 + information) / ALPHA**2))
