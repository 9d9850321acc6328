"""Upper confidence bounds of a loss, each one-sided with 95 % confidence."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, pstdev, stdev

from tsx_cli.bench.load.statistics import t_quantile

CONFIDENCE = 0.95
MAX_DRAWS = 400  # samples of a bootstrap
MIN_DRAWS = 40  # samples for a slow metric
MAX_BOOTSTRAP_S = 10.0
MIN_SKEWNESS = 3.0  # about the skewness of a squared error, which few rows underestimate
_Z = NormalDist().inv_cdf(CONFIDENCE)


def share_bound(count: int, rows: int) -> float:
    """Bound the fraction of all rows that differ, if `count` of `rows` do.

    The interval is the exact one of Clopper and Pearson (1934).
    """
    if count >= rows:
        return 1.0
    if not count:
        return -math.expm1(math.log(1 - CONFIDENCE) / rows)
    return _find_root(
        lambda share: _binomial_cdf(count, rows, share) - (1 - CONFIDENCE), count / rows, 1.0
    )


def rows_for(share: float) -> int:
    """Return how many rows without a difference are needed to bound the fraction by `share`."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-share)) if share < 1 else 1


def net_bound(losses: int, gains: int, rows: int) -> float:
    """Bound the fraction of lost rows minus the fraction of gained rows.

    If there are no gains, the bound is exact. Otherwise it is the score interval for paired
    proportions (Tango, Statistics in Medicine 17, 1998), in the notation of that paper.
    """
    b, c, n = losses, gains, rows
    if not c:
        return share_bound(b, n)

    def score(loss: float) -> float:
        linear = (2 * n - b + c) * loss - b - c
        gained = (math.sqrt(linear * linear + 8 * n * c * loss * (1 - loss)) - linear) / (4 * n)
        variance = n * (2 * gained + loss * (1 - loss))
        return (b - c - n * loss) / math.sqrt(variance) + _Z if variance > 0 else -math.inf

    return _find_root(score, (b - c) / n, 1.0)


def mean_bound(losses: Sequence[float]) -> float:
    """Bound the mean of paired losses; a few of them may be much larger than the others."""
    if len(losses) < 2:
        return fmean(losses) + 1
    mean, spread, root_rows = fmean(losses), stdev(losses), math.sqrt(len(losses))
    return (
        mean
        if not spread
        else _bound(
            mean,
            spread / root_rows,
            max(MIN_SKEWNESS, _skewness(losses)) / root_rows,
            len(losses) - 1,
        )
    )


def resampled_bound(
    loss: Callable[[Sequence[int]], float],
    rows: int,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[float, float]:
    """Return the loss and its bound for a metric that scores all rows together.

    The bound is a bootstrap over rows; `loss` takes the number of times that each row counts.
    """
    rng, deadline = random.Random(seed), clock() + MAX_BOOTSTRAP_S
    point, losses = loss([1] * rows), list[float]()
    while len(losses) < MAX_DRAWS and (len(losses) < MIN_DRAWS or clock() < deadline):
        counts = [0] * rows
        for row in rng.choices(range(rows), k=rows):
            counts[row] += 1
        losses.append(loss(counts))
    # Resampled rows vary less than real rows; the factor corrects this.
    error = stdev(losses) * math.sqrt(rows / max(1, rows - 1))
    skewness = max(MIN_SKEWNESS / math.sqrt(rows), _skewness(losses))
    return point, (
        point if not error else _bound(point, error, skewness, max(1, min(rows, len(losses)) - 1))
    )


def _bound(loss: float, error: float, skewness: float, freedom: int) -> float:
    """Bound a loss by Student's t, corrected for the skewness of the estimate.

    The correction is from Hall (Annals of Statistics 16, 1988).
    """
    t = t_quantile(freedom, 2 * CONFIDENCE - 1)
    return loss + error * (t + skewness * (2 * t * t + 1) / 6)


def _skewness(values: Sequence[float]) -> float:
    mean, spread = fmean(values), pstdev(values)
    return fmean(((value - mean) / spread) ** 3 for value in values) if spread else 0.0


def _binomial_cdf(count: int, rows: int, share: float) -> float:
    """Return the probability that at most `count` of `rows` differ."""
    odds = (1 - share) / share
    log_ways = math.lgamma(rows + 1) - math.lgamma(count + 1) - math.lgamma(rows - count + 1)
    term = total = math.exp(
        log_ways + count * math.log(share) + (rows - count) * math.log1p(-share)
    )
    for number in range(count, 0, -1):
        term *= odds * number / (rows - number + 1)
        total += term
        if term < total * 1e-12:
            break
    return total


def _find_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the point at which a decreasing function reaches 0."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high
