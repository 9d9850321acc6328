"""Quantiles by nearest rank: the smallest value that covers a given share of all values."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return the quantile `share` (0 to 1) of ascending values.

    Raises:
        IndexError: There are no values.
    """
    return ordered[_rank(len(ordered), share) - 1]


def bucket_of(counts: Iterable[int], share: float) -> int:
    """Return the index of the bucket that holds the quantile `share` (0 to 1).

    Args:
        counts: The number of values in each bucket, in ascending order of the values.
        share: The share of all values that the quantile covers.

    Raises:
        IndexError: There are no buckets.
    """
    totals = list(accumulate(counts))
    return bisect_left(totals, _rank(totals[-1], share))


def _rank(count: int, share: float) -> int:
    # In floating point, 0.07 * 100 is a little more than 7.
    return max(1, math.ceil(count * share - 1e-9))
