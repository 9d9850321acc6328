"""Quantiles by nearest rank: the smallest value that is not less than a given fraction of all."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


def nearest_rank(sorted_values: Sequence[float], quantile: float) -> float:
    """Return a quantile (0 to 1) of ascending values.

    Raises:
        IndexError: There are no values.
    """
    return sorted_values[_rank(len(sorted_values), quantile) - 1]


def bucket_of(counts: Iterable[int], quantile: float) -> int:
    """Return the index of the bucket that contains a quantile (0 to 1).

    Args:
        counts: The number of values in each bucket, in ascending order of the values.
        quantile: The fraction of the values that lie at or below the quantile.

    Raises:
        IndexError: There are no buckets.
    """
    cumulative_counts = list(accumulate(counts))
    return bisect_left(cumulative_counts, _rank(cumulative_counts[-1], quantile))


def _rank(count: int, quantile: float) -> int:
    # The subtraction corrects rounding: in floating point, 0.07 * 100 is a little more than 7.
    return max(1, math.ceil(count * quantile - 1e-9))
