"""The significance of counted rates: exact one-sided tests of proportions, the z-test for large
counts, and confidence intervals.
"""

from __future__ import annotations

import math
from statistics import NormalDist

MANY = 10_000  # hits of each side beyond which the normal distribution is as good
SURE = NormalDist().inv_cdf(0.975)  # standard deviations: 95 %
NEGLIGIBLE = 1e-16  # of a sum: further terms change it no more


def above(hits: int, count: int, rate: float) -> float:
    """The chance of `hits` or more of `count` where each hits with the probability `rate`; 1 where
    there are no more than expected.
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
    while term > total * NEGLIGIBLE:  # beyond the mean each term is smaller than the one before
        total += term
        term *= (count - k) / (k + 1) * odds
        k += 1
    return min(1.0, total)


def worse(hits: int, count: int, base_hits: int, base_count: int) -> float:
    """The chance of such a difference, or a larger one, if both hit at the same rate; 1 where the
    first does not hit more often.

    Fisher's exact test, and for large counts the z-test with the pooled rate.
    """
    if not count or not base_count or hits * base_count <= base_hits * count:
        return 1.0
    all_hits, everything = hits + base_hits, count + base_count
    if min(hits, base_hits) > MANY:
        pooled = all_hits / everything
        spread = math.sqrt(pooled * (1 - pooled) * (1 / count + 1 / base_count))
        return NormalDist().cdf((base_hits / base_count - hits / count) / spread)
    logs = (
        _log_choices(all_hits, hits)
        + _log_choices(everything - all_hits, count - hits)
        - _log_choices(everything, count)
    )
    term = math.exp(logs)
    total, k = 0.0, hits
    while term > total * NEGLIGIBLE and k <= min(all_hits, count):
        total += term
        term *= (all_hits - k) * (count - k) / ((k + 1) * (base_count - all_hits + k + 1))
        k += 1
    return min(1.0, total)


def interval(hits: int, count: int) -> tuple[float, float]:
    """Where a rate lies with 95 % confidence, of which `hits` of `count` were seen (Wilson's score
    interval).
    """
    if not count:
        return 0.0, 1.0
    rate, square = hits / count, SURE**2
    middle = (rate + square / (2 * count)) / (1 + square / count)
    half = (
        SURE / (1 + square / count) * math.sqrt(rate * (1 - rate) / count + square / (4 * count**2))
    )
    return (0.0 if not hits else max(0.0, middle - half)), (
        1.0 if hits == count else min(1.0, middle + half)
    )


def _log_choices(count: int, chosen: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)
