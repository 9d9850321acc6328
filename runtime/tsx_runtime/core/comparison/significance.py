"""The significance of counted rates: tests of proportions and confidence intervals."""

from __future__ import annotations

import math
from statistics import NormalDist

MIN_NORMAL_HITS = 10_000  # With more hits on both sides, the normal distribution is exact enough.
Z_95 = NormalDist().inv_cdf(0.975)  # standard deviations of a 95 % interval
RELATIVE_PRECISION = 1e-16  # A term that is smaller than this part of the sum does not change it.


def excess_probability(hits: int, count: int, rate: float) -> float:
    """Return the probability of at least `hits` in `count` trials with the probability `rate`.

    The result is 1 if there are no more hits than expected.
    """
    if hits <= count * rate:
        return 1.0
    if rate <= 0.0:
        return 0.0
    odds = rate / (1 - rate)
    term = math.exp(
        _log_choices(count, hits) + hits * math.log(rate) + (count - hits) * math.log1p(-rate)
    )
    total, k = 0.0, hits
    # The loop ends: beyond the mean, each term is smaller than the one before.
    while term > total * RELATIVE_PRECISION:
        total += term
        term *= (count - k) / (k + 1) * odds
        k += 1
    return min(1.0, total)


def difference_probability(hits: int, count: int, base_hits: int, base_count: int) -> float:
    """Return the probability of such a difference, or a larger one, if both rates are equal.

    It comes from Fisher's exact test, or for large counts from the z-test with the pooled rate. It
    is 1 if the first rate is not higher.
    """
    if not count or not base_count or hits * base_count <= base_hits * count:
        return 1.0
    all_hits, total_count = hits + base_hits, count + base_count
    if min(hits, base_hits) > MIN_NORMAL_HITS:
        pooled = all_hits / total_count
        spread = math.sqrt(pooled * (1 - pooled) * (1 / count + 1 / base_count))
        return NormalDist().cdf((base_hits / base_count - hits / count) / spread)
    logs = (
        _log_choices(all_hits, hits)
        + _log_choices(total_count - all_hits, count - hits)
        - _log_choices(total_count, count)
    )
    term = math.exp(logs)
    total, k = 0.0, hits
    while term > total * RELATIVE_PRECISION and k <= min(all_hits, count):
        total += term
        term *= (all_hits - k) * (count - k) / ((k + 1) * (base_count - all_hits + k + 1))
        k += 1
    return min(1.0, total)


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of the rate of `hits` in `count` trials."""
    if not count:
        return 0.0, 1.0
    rate, square = hits / count, Z_95**2
    middle = (rate + square / (2 * count)) / (1 + square / count)
    half = (
        Z_95 / (1 + square / count) * math.sqrt(rate * (1 - rate) / count + square / (4 * count**2))
    )
    return (0.0 if not hits else max(0.0, middle - half)), (
        1.0 if hits == count else min(1.0, middle + half)
    )


def _log_choices(count: int, size: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(size + 1) - math.lgamma(count - size + 1)
