"""Quantiles by nearest rank: the smallest value that a given share of all values does not
exceed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Raises IndexError where there are no values."""
    return ordered[_rank(len(ordered), share) - 1]


def bucket_of(counts: Iterable[int], share: float) -> int:
    """The index of the bucket that holds that value, given how many each bucket holds.

    Raises IndexError where there are no buckets.
    """
    reached = list(accumulate(counts))
    return bisect_left(reached, _rank(reached[-1], share))


def _rank(count: int, share: float) -> int:
    return max(1, math.ceil(count * share - 1e-9))  # 0.07 * 100 is a little more than 7
