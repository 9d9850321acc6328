"""The latency curve of a version: how long a batch of n requests takes, learned from the batches
that it serves.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import NormalDist

# The sizes at which times are kept; between them the curve is linear
SIZES: tuple[int, ...] = (
    *range(1, 9),
    10,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    64,
    80,
    96,
    128,
    160,
    192,
    256,
    320,
    384,
    512,
    640,
    768,
    1024,
)
# batches of each size, whose median counts: a size's time relative to other sizes hardly changes
SHAPE = 240
LEVEL = (
    15,
    120,
    # batches of any size, whose median says how fast the machine is now: few follow a change, many
    # where times scatter
)
PRECISE = 0.04  # error of that median that is accepted
# batches of any size, of which the tail is the quantile: how many times the median they took
RATIOS = 384
# seconds of a batch: a clock may be too coarse to tell its ends apart, and a benchmark comes from
# anybody
SHORTEST = 1e-6
STALE = 10.0  # seconds after which a size has to agree with the sizes that are served now
ENOUGH = 2  # batches of the largest size, before a larger one is tried
# batches of a size, and it is tried again after STALE as if it were fast: the first ones may have
# been slow by chance
FEW = 8
# of a request's time alone, that a second one is expected to add: where that is wrong, one batch
# tells
FIRST_STEP = 0.25


class Window:
    """The newest values, and their order."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values = deque(values)
        self.ordered = sorted(self._values)

    def __len__(self) -> int:
        return len(self.ordered)

    def add(self, value: float, keep: int) -> None:
        self._values.append(value)
        insort(self.ordered, value)
        while len(self._values) > keep:
            del self.ordered[bisect_left(self.ordered, self._values.popleft())]

    @property
    def median(self) -> float:
        half = len(self.ordered) // 2
        return (self.ordered[half] + self.ordered[~half]) / 2


class LatencyCurve:
    """Typical times by batch size, and how far batches of any size exceed them.

    Three things are learned apart, each from as many batches as it takes: how the times of the
    sizes relate (the shape), how fast the machine is now, which all sizes share (the level), and
    the tail.
    """

    def __init__(self, quantile: float, measured: Iterable[tuple[int, float]] = ()) -> None:
        """`measured`: batch sizes with their median seconds, from a benchmark."""
        self.quantile = quantile
        self._grown = 1  # the largest batch that may be tried
        self._cap = SIZES[-1]  # and that other limits have left room for
        self.tail = 1.0  # how many times the typical time the quantile is
        self.mean = 1.0  # and the mean; what is beyond the quantile counts as the quantile
        self._times: dict[int, Window] = {}  # seconds at level 1
        self._at: dict[int, float] = {}  # when a batch of the size was last answered
        self._sizes: list[int] = []
        self._fitted: list[float] = []  # seconds at level 1, never decreasing
        self._levels = Window()
        self._level = 1.0
        self._last = 0.0  # logarithm of the last ratio
        self.scatter = (
            0.0  # of these, the mean difference from batch to batch: drift does not count
        )
        self._ratios = Window()
        points = sorted(dict(measured).items())
        for size, seconds in points:
            place = SIZES[bisect_left(SIZES, min(size, SIZES[-1]))]
            self._times[place] = Window(
                [max(seconds if place == size else _seconds_at(points, place), SHORTEST)] * FEW
            )
            self._at[place] = -math.inf
        for ratio in (1.0, 1.0 if self._times else 1.1):
            self._add_ratio(ratio)
        if self._times:
            self._fit(next(iter(self._times)))

    @property
    def known(self) -> bool:
        return bool(self._sizes)

    @property
    def batches(self) -> int:
        """Newest ones that the tail is of."""
        return len(self._ratios)

    def add(self, size: float, seconds: float, now: float) -> None:
        """A batch of `size` requests took so long; `now` is any clock that all calls share."""
        seconds = max(seconds, SHORTEST)
        place = SIZES[bisect_left(SIZES, min(size, SIZES[-1]))]
        times = self._times.setdefault(place, Window())
        if self.known and (shape := self._shape(size)) > 0:
            ratio = min(max(seconds / (shape * self._level), 1e-6), 1e6)
            last, self._last = self._last, math.log(ratio)
            self.scatter += (min(abs(self._last - last), 1.0) - self.scatter) / min(
                len(self._ratios), 50
            )
            self._add_ratio(ratio)
            if len(times) >= ENOUGH:
                self._add_level(max(seconds / shape, 1e-9))
            seconds *= self._shape(place) / shape
        times.add(seconds / self._level, SHAPE)
        self._at[place] = now
        self._fit(place)

    @property
    def most(self) -> int:
        """The largest batch that can be expected."""
        return min(self._grown, self._cap)

    @property
    def capped(self) -> bool:
        return self._cap < self._grown

    def sent(self, size: float, *, cut: bool) -> None:
        """A batch has left; `cut`: another limit, such as that of bytes, made it smaller than was
        decided.
        """
        self._cap = max(math.ceil(size), self.most * 3 // 4 if cut else self._cap)

    def typical(self, size: float) -> float:
        """Seconds, the median. Needs `known`."""
        return self._shape(size) * self._level

    def _shape(self, size: float) -> float:
        sizes, fitted = self._sizes, self._fitted
        right = bisect_left(sizes, size)
        if right == 0:
            return fitted[0]
        if right == len(sizes):  # beyond the largest known size it goes on as it came
            if right == 1:
                return fitted[0] * (1 + FIRST_STEP * (size / sizes[0] - 1))
            return fitted[-1] + (fitted[-1] - fitted[0]) / (sizes[-1] - sizes[0]) * (
                size - sizes[-1]
            )
        slope = (fitted[right] - fitted[right - 1]) / (sizes[right] - sizes[right - 1])
        return fitted[right - 1] + slope * (size - sizes[right - 1])

    def largest(self, seconds: float) -> int:
        """The largest batch whose typical time is no longer; 0 where one request takes longer."""
        low, high = 0, self.most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.typical(middle) <= seconds else (low, middle - 1)
        return low

    def _add_level(self, level: float) -> None:
        least, most = LEVEL
        self._levels.add(level, min(most, max(least, round((self.scatter / PRECISE) ** 2 * 1.25))))
        self._level = self._levels.median

    def _add_ratio(self, ratio: float) -> None:
        self._ratios.add(ratio, RATIOS)
        self._summarise()

    def retarget(self, quantile: float) -> None:
        self.quantile = quantile
        self._summarise()

    def _summarise(self) -> None:
        ordered = self._ratios.ordered
        count = len(ordered)
        within = min(math.ceil(self.quantile * (count + 1)), count)
        self.tail = max(1.0, ordered[within - 1])
        if within == count:  # too few: what a lognormal distribution of this scatter would have
            self.tail = max(
                self.tail, math.exp(NormalDist().inv_cdf(self.quantile) * self.scatter / 1.128)
            )
        self.mean = (sum(ordered[:within]) + self.tail * (count - within)) / count

    def _fit(self, newest: int) -> None:
        """A larger batch takes no less time: medians that say otherwise are pooled, by the number
        of their batches.

        What was measured long ago counts little, and takes no more per request than what is served
        now.
        """
        self._sizes = sizes = sorted(self._times)
        fresh = self._at[newest] - STALE
        pooled: list[tuple[float, float, int]] = []  # seconds, weight, sizes
        for size in sizes:
            stale = self._at[size] < fresh
            seconds, weight, count = (
                self._times[size].median,
                1.0 if stale else float(len(self._times[size])),
                1,
            )
            if stale and size > newest and pooled:
                step = 1.0 if len(self._times[size]) >= FEW else FIRST_STEP
                seconds = min(
                    seconds, pooled[-1][0] * (1 + step * (size / sizes[sizes.index(size) - 1] - 1))
                )
            while pooled and pooled[-1][0] > seconds:
                other, more, further = pooled.pop()
                seconds = (seconds * weight + other * more) / (weight + more)
                weight, count = weight + more, count + further
            pooled.append((seconds, weight, count))
        self._fitted = [seconds for seconds, _, count in pooled for _ in range(count)]
        largest = max((size for size in sizes if len(self._times[size]) >= ENOUGH), default=0)
        self._grown = (
            SIZES[min(bisect_left(SIZES, largest) + 1, len(SIZES) - 1)] if largest else sizes[0]
        )


def _seconds_at(points: Sequence[tuple[int, float]], size: int) -> float:
    """By the two measured sizes beside it, or the last two."""
    if len(points) == 1:
        only, seconds = points[0]
        return seconds * (1 + FIRST_STEP * (size / only - 1))
    right = min(max(bisect_left(points, (size,)), 1), len(points) - 1)
    (low, first), (high, last) = points[right - 1 : right + 1]
    slope = (last - first) / (high - low)
    return last + (max(slope, 0.0) if size > high else slope) * (size - high)
