"""The difference of two means, with an interval that stays valid however often it is read.

The interval is a normal mixture confidence sequence (Johari, Pekelis, Walsh: Always Valid
Inference, 2015; Waudby-Smith et al.: Time-uniform central limit theory, 2021). It holds at all
times together with the probability 1 - alpha, so a test may end as soon as it excludes 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

ALPHA = 0.05
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


class MeanDifference(NamedTuple):
    """The difference `new - old` of two means, with its interval."""

    value: float
    low: float
    high: float


def compare_means(
    new: MetricCounts, old: MetricCounts, *, alpha: float = ALPHA, scale: float = SCALE
) -> MeanDifference:
    """Compare two means by an interval that may be read at any time.

    Args:
        new: The counts of the new version.
        old: The counts of the old version.
        alpha: The probability that the interval ever excludes the true difference.
        scale: The difference for which the interval becomes narrow soonest, in units of the metric.
    """
    value = new.mean - old.mean
    if min(new.count, old.count) < MIN_COUNT:
        return MeanDifference(value, -math.inf, math.inf)
    variance = new.variance / new.count + old.variance / old.count
    radius = _radius(variance, alpha, scale)
    return MeanDifference(value, value - radius, value + radius)


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
    alpha: float = ALPHA,
    scale: float = SCALE,
    old_grows: bool = True,
) -> int:
    """Estimate how many more answers of each version narrow the interval to +- `difference`.

    The result is at most `MAX_NEEDED`. If not `old_grows`, only the new version gets answers.
    """
    low, high = 0, MAX_NEEDED

    def is_enough(more: int) -> bool:
        new_count = new.count + more
        old_count = old.count + (more if old_grows else 0)
        if min(new_count, old_count) < MIN_COUNT:
            return False
        variance = new.variance / new_count + old.variance / old_count
        return _radius(variance, alpha, scale) <= difference

    if difference <= 0 or not is_enough(high):
        return MAX_NEEDED
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return low


def round_count(count: int) -> int:
    """Round an estimated count to two significant digits."""
    return int(float(f"{count:.2g}"))


def _radius(variance: float, alpha: float, scale: float) -> float:
    """Return the half width for a difference whose estimate has this variance."""
    if not variance:  # All values of each version are the same.
        return 0.0
    information = scale**2 / variance
    return math.sqrt(variance * (1 + 1 / information) * math.log((1 + information) / alpha**2))
