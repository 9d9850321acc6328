"""The latency curve of a version: how long a batch of n requests takes, learned from the batches that it serves."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

# The sizes at which times are kept; between them the curve is linear
SIZES: tuple[int, ...] = (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
KEPT = 15  # batches of each size, whose median counts: one outlier changes nothing, and seven batches follow a change
RATIOS = 256  # batches of any size, of which the tail is the quantile: how many times the median they took
STALE = 10.0  # seconds after which a size has to agree with the sizes that are served now
ENOUGH = 2  # batches of the largest size, before a larger one is tried
FIRST_STEP = 0.25  # of a request's time alone, that a second one is expected to add: where that is wrong, one batch tells


class LatencyCurve:
    """Typical times by batch size, and how far batches of any size exceed them.

    The two are learned apart: a few batches tell what is typical of a size, the tail takes hundreds.
    """

    def __init__(self, quantile: float, measured: Iterable[tuple[int, float]] = (), spread: float = 0.0) -> None:
        """`measured`: batch sizes with their median seconds, from a benchmark; `spread`: their coefficient of variation."""
        self.quantile = quantile
        self._grown = 1  # the largest batch that may be tried
        self._cap = SIZES[-1]  # and that other limits have left room for
        self.tail = 1.0  # how many times the typical time the quantile is; of too few batches to see it, the largest
        self.mean = 1.0  # and the mean; what is beyond the quantile counts as the quantile
        self._times: dict[int, deque[float]] = {}
        self._at: dict[int, float] = {}  # when a batch of the size was last answered
        self._sizes: list[int] = []
        self._fitted: list[float] = []  # seconds, never decreasing
        self._ratios: deque[float] = deque(maxlen=RATIOS)
        self._ordered: list[float] = []
        for size, seconds in sorted(measured):
            place = SIZES[bisect_left(SIZES, min(size, SIZES[-1]))]
            self._times[place] = deque([seconds] * ENOUGH, maxlen=KEPT)
            self._at[place] = -math.inf
        for ratio in (1.0, 1.0 + 3 * spread if self._times else 1.1):
            self._add_ratio(ratio)
        if self._times:
            self._fit(next(iter(self._times)))

    @property
    def known(self) -> bool:
        return bool(self._sizes)

    def add(self, size: int, seconds: float, now: float) -> None:
        """A batch of `size` requests took so long; `now` is any clock that all calls share."""
        place = SIZES[bisect_left(SIZES, min(size, SIZES[-1]))]
        if self.known:
            typical = self.typical(size)
            if typical > 0:
                self._add_ratio(min(seconds / typical, 1e6))
                seconds *= self.typical(place) / typical
        times = self._times.setdefault(place, deque(maxlen=KEPT))
        if now - self._at.get(place, -math.inf) > STALE:
            times.clear()
        times.append(seconds)
        self._at[place] = now
        self._fit(place)

    @property
    def most(self) -> int:
        """The largest batch that can be expected."""
        return min(self._grown, self._cap)

    @property
    def capped(self) -> bool:
        return self._cap < self._grown

    def sent(self, size: int, *, cut: bool) -> None:
        """A batch has left; `cut`: another limit, such as that of bytes, made it smaller than was decided."""
        self._cap = max(size, self.most * 3 // 4 if cut else self._cap)

    def typical(self, size: int) -> float:
        """Seconds, the median; beyond the largest known size the last slope goes on. Needs `known`."""
        sizes, fitted = self._sizes, self._fitted
        right = bisect_left(sizes, size)
        if right == 0:
            return fitted[0]
        if len(sizes) == 1:
            return fitted[0] * (1 + FIRST_STEP * (size / sizes[0] - 1))
        right = min(right, len(sizes) - 1)
        slope = (fitted[right] - fitted[right - 1]) / (sizes[right] - sizes[right - 1])
        return fitted[right - 1] + slope * (size - sizes[right - 1])

    def largest(self, seconds: float) -> int:
        """The largest batch whose typical time is no longer; 0 where one request takes longer."""
        low, high = 0, self.most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.typical(middle) <= seconds else (low, middle - 1)
        return low

    def _add_ratio(self, ratio: float) -> None:
        if len(self._ratios) == RATIOS:
            oldest = self._ratios[0]
            del self._ordered[bisect_left(self._ordered, oldest)]
        self._ratios.append(ratio)
        insort(self._ordered, ratio)
        self._summarise()

    def retarget(self, quantile: float) -> None:
        self.quantile = quantile
        self._summarise()

    def _summarise(self) -> None:
        ordered = self._ordered
        count = len(ordered)
        within = min(math.ceil(self.quantile * (count + 1)), count)
        self.tail = max(1.0, ordered[within - 1])
        self.mean = (sum(ordered[:within]) + self.tail * (count - within)) / count

    def _fit(self, newest: int) -> None:
        """A larger batch takes no less time. What was measured long ago may have drifted: there, it takes no more per request either."""
        self._sizes = sizes = sorted(self._times)
        fitted = [sorted(self._times[size])[len(self._times[size]) // 2] for size in sizes]
        fresh = self._at[newest] - STALE
        middle = sizes.index(newest)
        for place in range(middle + 1, len(sizes)):
            near, size = fitted[place - 1], sizes[place]
            if self._at[size] < fresh:
                fitted[place] = min(fitted[place], near * size / sizes[place - 1])
            fitted[place] = max(fitted[place], near)
        for place in range(middle - 1, -1, -1):
            near, size = fitted[place + 1], sizes[place]
            if self._at[size] < fresh:
                fitted[place] = max(fitted[place], near * size / sizes[place + 1])
            fitted[place] = min(fitted[place], near)
        self._fitted = fitted
        largest = max((size for size in sizes if len(self._times[size]) >= ENOUGH), default=0)
        self._grown = SIZES[min(bisect_left(SIZES, largest) + 1, len(SIZES) - 1)] if largest else sizes[0]
