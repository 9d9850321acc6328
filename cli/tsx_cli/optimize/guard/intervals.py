"""Upper bounds of a loss, each with 95 % confidence on one side."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, pstdev, stdev

from tsx_cli.bench.load.statistics import t_quantile

CONFIDENCE = 0.95
DRAWS = 400  # of a bootstrap
FEWEST_DRAWS = 40  # of a metric that is slow
PATIENCE = 10.0  # seconds for a bootstrap
LEAST_SKEWNESS = 3.0  # of a row's loss, about that of a squared error: few rows underestimate it
_Z = NormalDist().inv_cdf(CONFIDENCE)


def share_bound(count: int, rows: int) -> float:
    """The share of all rows that differ, if `count` of `rows` do: the exact interval of Clopper and
    Pearson (1934).
    """
    if count >= rows:
        return 1.0
    if not count:
        return -math.expm1(math.log(1 - CONFIDENCE) / rows)
    return _crossing(
        lambda share: _at_most(count, rows, share) - (1 - CONFIDENCE), count / rows, 1.0
    )


def rows_for(share: float) -> int:
    """How many rows without a difference show that at most this share of all rows differ."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-share)) if share < 1 else 1


def net_bound(losses: int, gains: int, rows: int) -> float:
    """The share of rows that are lost minus the share that are gained.

    Exact without gains; with them the score interval for paired proportions (Tango, Statistics in
    Medicine 17, 1998), in its notation.
    """
    b, c, n = losses, gains, rows
    if not c:
        return share_bound(b, n)

    def score(loss: float) -> float:
        linear = (2 * n - b + c) * loss - b - c
        gained = (math.sqrt(linear * linear + 8 * n * c * loss * (1 - loss)) - linear) / (4 * n)
        variance = n * (2 * gained + loss * (1 - loss))
        return (b - c - n * loss) / math.sqrt(variance) + _Z if variance > 0 else -math.inf

    return _crossing(score, (b - c) / n, 1.0)


def mean_bound(losses: Sequence[float]) -> float:
    """The mean of paired losses, a few of which may be much larger than the others."""
    if len(losses) < 2:
        return fmean(losses) + 1
    mean, spread, root = fmean(losses), stdev(losses), math.sqrt(len(losses))
    return (
        mean
        if not spread
        else _bound(
            mean, spread / root, max(LEAST_SKEWNESS, _skewness(losses)) / root, len(losses) - 1
        )
    )


def resampled_bound(
    loss: Callable[[Sequence[int]], float],
    rows: int,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[float, float]:
    """(Loss, bound) of a metric of all rows together, by a bootstrap over rows.

    `loss` takes how many times each row counts.
    """
    chance, ends, found, drawn = (
        random.Random(seed),
        clock() + PATIENCE,
        loss([1] * rows),
        list[float](),
    )
    while len(drawn) < DRAWS and (len(drawn) < FEWEST_DRAWS or clock() < ends):
        counts = [0] * rows
        for row in chance.choices(range(rows), k=rows):
            counts[row] += 1
        drawn.append(loss(counts))
    error = stdev(drawn) * math.sqrt(
        rows / max(1, rows - 1)
    )  # resampled rows differ less than rows do
    skewness = max(LEAST_SKEWNESS / math.sqrt(rows), _skewness(drawn))
    return found, (
        found if not error else _bound(found, error, skewness, max(1, min(rows, len(drawn)) - 1))
    )


def _bound(loss: float, error: float, skewness: float, freedom: int) -> float:
    """By Student's t, corrected for the skewness of the estimate (Hall, Annals of Statistics 16,
    1988).
    """
    t = t_quantile(freedom, 2 * CONFIDENCE - 1)
    return loss + error * (t + skewness * (2 * t * t + 1) / 6)


def _skewness(values: Sequence[float]) -> float:
    mean, spread = fmean(values), pstdev(values)
    return fmean(((value - mean) / spread) ** 3 for value in values) if spread else 0.0


def _at_most(count: int, rows: int, share: float) -> float:
    """The probability that at most `count` of `rows` differ."""
    odds = (1 - share) / share
    ways = math.lgamma(rows + 1) - math.lgamma(count + 1) - math.lgamma(rows - count + 1)
    term = total = math.exp(ways + count * math.log(share) + (rows - count) * math.log1p(-share))
    for number in range(count, 0, -1):
        term *= odds * number / (rows - number + 1)
        total += term
        if term < total * 1e-12:
            break
    return total


def _crossing(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where it falls to 0, from above."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
