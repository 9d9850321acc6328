"""The latency curve of a version: the duration of a batch by its size, learned while it serves."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import NormalDist

# Sizes whose times are recorded. Between them the curve is linear.
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
# The number of newest batches of each size that count; it is large, since the ratio between sizes
# hardly changes.
SHAPE_BATCHES = 240
# The number of newest batches of any size that show the speed of the machine. Few of them follow a
# change quickly, many of them average scattered times.
LEVEL_BATCHES = (15, 120)
LEVEL_PRECISION = 0.04  # accepted relative error of the speed
TAIL_BATCHES = 384  # newest batches of any size that show the tail
# Shorter times are replaced by this one, because clocks are coarse and benchmarks may be wrong.
MIN_SECONDS = 1e-6
STALE_S = 10.0  # A size without a batch for this time is stale: it must agree with the others.
MIN_BATCHES = 2  # batches of the largest size before a larger one is tried
# A size with fewer batches may have been slow by chance, and is tried again after STALE_S.
FEW_BATCHES = 8
GROWTH_PER_REQUEST = 0.25  # assumed extra time of a second request, until it is measured


class Window:
    """The newest values, in the order of their arrival and sorted."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values = deque(values)
        self.sorted_values = sorted(self._values)

    def __len__(self) -> int:
        return len(self.sorted_values)

    def add(self, value: float, limit: int) -> None:
        self._values.append(value)
        insort(self.sorted_values, value)
        while len(self._values) > limit:
            del self.sorted_values[bisect_left(self.sorted_values, self._values.popleft())]

    @property
    def median(self) -> float:
        half = len(self.sorted_values) // 2
        return (self.sorted_values[half] + self.sorted_values[~half]) / 2


class LatencyCurve:
    """Typical times by batch size, and the tail of the times of batches of any size.

    Three parts are learned from different numbers of batches: the ratio between sizes (the shape),
    the current speed of the machine (the level), and the tail.
    """

    def __init__(self, quantile: float, measured: Iterable[tuple[int, float]] = ()) -> None:
        """Begin with batch sizes and their median seconds that a benchmark has measured."""
        self.quantile = quantile
        self._max_tried = 1  # largest batch that may be tried next
        self._max_sent = SIZES[-1]  # largest batch that other limits permit
        self.tail = 1.0  # ratio of the quantile to the typical time
        self.mean = 1.0  # ratio of the mean to it; times above the quantile count as the quantile
        self._times: dict[int, Window] = {}  # seconds at level 1
        self._answered_at: dict[int, float] = {}  # time of the last answer by size
        self._sizes: list[int] = []
        self._fitted: list[float] = []  # seconds at level 1, in ascending order
        self._levels = Window()
        self._level = 1.0
        self._last_log = 0.0  # logarithm of the last ratio
        # The mean difference of these logarithms from batch to batch, which ignores a slow drift.
        self.scatter = 0.0
        self._ratios = Window()
        points = sorted(dict(measured).items())
        for size, seconds in points:
            bucket = SIZES[bisect_left(SIZES, min(size, SIZES[-1]))]
            self._times[bucket] = Window(
                [max(seconds if bucket == size else _seconds_at(points, bucket), MIN_SECONDS)]
                * FEW_BATCHES
            )
            self._answered_at[bucket] = -math.inf
        for ratio in (1.0, 1.0 if self._times else 1.1):
            self._add_ratio(ratio)
        if self._times:
            self._fit(next(iter(self._times)))

    @property
    def known(self) -> bool:
        return bool(self._sizes)

    @property
    def batches(self) -> int:
        """The number of newest batches that show the tail."""
        return len(self._ratios)

    def add(self, size: float, seconds: float, now: float) -> None:
        """Learn from a batch of `size` requests; all calls share a clock for `now`."""
        seconds = max(seconds, MIN_SECONDS)
        bucket = SIZES[bisect_left(SIZES, min(size, SIZES[-1]))]
        times = self._times.setdefault(bucket, Window())
        if self.known and (shape := self._shape(size)) > 0:
            ratio = min(max(seconds / (shape * self._level), 1e-6), 1e6)
            last_log, self._last_log = self._last_log, math.log(ratio)
            self.scatter += (min(abs(self._last_log - last_log), 1.0) - self.scatter) / min(
                len(self._ratios), 50
            )
            self._add_ratio(ratio)
            if len(times) >= MIN_BATCHES:
                self._add_level(max(seconds / shape, 1e-9))
            seconds *= self._shape(bucket) / shape
        times.add(seconds / self._level, SHAPE_BATCHES)
        self._answered_at[bucket] = now
        self._fit(bucket)

    @property
    def max_size(self) -> int:
        """The largest batch that may be planned."""
        return min(self._max_tried, self._max_sent)

    @property
    def is_capped(self) -> bool:
        return self._max_sent < self._max_tried

    def sent(self, size: float, *, cut: bool) -> None:
        """Note the size of a sent batch; `cut` means that another limit has made it smaller."""
        self._max_sent = max(math.ceil(size), self.max_size * 3 // 4 if cut else self._max_sent)

    def typical(self, size: float) -> float:
        """Return the median seconds of a batch; the curve must be `known`."""
        return self._shape(size) * self._level

    def _shape(self, size: float) -> float:
        sizes, fitted = self._sizes, self._fitted
        right = bisect_left(sizes, size)
        if right == 0:
            return fitted[0]
        if right == len(sizes):  # Extend the curve beyond the largest measured size.
            if right == 1:
                return fitted[0] * (1 + GROWTH_PER_REQUEST * (size / sizes[0] - 1))
            return fitted[-1] + (fitted[-1] - fitted[0]) / (sizes[-1] - sizes[0]) * (
                size - sizes[-1]
            )
        slope = (fitted[right] - fitted[right - 1]) / (sizes[right] - sizes[right - 1])
        return fitted[right - 1] + slope * (size - sizes[right - 1])

    def largest(self, seconds: float) -> int:
        """Return the largest batch with a typical time of at most `seconds`, or 0 without one."""
        low, high = 0, self.max_size
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.typical(middle) <= seconds else (low, middle - 1)
        return low

    def _add_level(self, level: float) -> None:
        min_batches, max_batches = LEVEL_BATCHES
        self._levels.add(
            level,
            min(max_batches, max(min_batches, round((self.scatter / LEVEL_PRECISION) ** 2 * 1.25))),
        )
        self._level = self._levels.median

    def _add_ratio(self, ratio: float) -> None:
        self._ratios.add(ratio, TAIL_BATCHES)
        self._summarise()

    def retarget(self, quantile: float) -> None:
        self.quantile = quantile
        self._summarise()

    def _summarise(self) -> None:
        ratios = self._ratios.sorted_values
        count = len(ratios)
        rank = min(math.ceil(self.quantile * (count + 1)), count)
        self.tail = max(1.0, ratios[rank - 1])
        if rank == count:  # There are too few values: assume a lognormal distribution.
            self.tail = max(
                self.tail, math.exp(NormalDist().inv_cdf(self.quantile) * self.scatter / 1.128)
            )
        self.mean = (sum(ratios[:rank]) + self.tail * (count - rank)) / count

    def _fit(self, newest: int) -> None:
        """Fit the times so that larger batches take no less time.

        If medians contradict this, they are pooled, weighted by their numbers of batches. Stale
        measurements get a small weight, and at most the time per request of sizes that are served
        now.
        """
        self._sizes = sizes = sorted(self._times)
        stale_before = self._answered_at[newest] - STALE_S
        pooled: list[tuple[float, float, int]] = []  # seconds, weight, sizes
        for size in sizes:
            is_stale = self._answered_at[size] < stale_before
            seconds, weight, count = (
                self._times[size].median,
                1.0 if is_stale else float(len(self._times[size])),
                1,
            )
            if is_stale and size > newest and pooled:
                growth = 1.0 if len(self._times[size]) >= FEW_BATCHES else GROWTH_PER_REQUEST
                seconds = min(
                    seconds,
                    pooled[-1][0] * (1 + growth * (size / sizes[sizes.index(size) - 1] - 1)),
                )
            while pooled and pooled[-1][0] > seconds:
                pooled_seconds, pooled_weight, pooled_count = pooled.pop()
                seconds = (seconds * weight + pooled_seconds * pooled_weight) / (
                    weight + pooled_weight
                )
                weight, count = weight + pooled_weight, count + pooled_count
            pooled.append((seconds, weight, count))
        self._fitted = [seconds for seconds, _, count in pooled for _ in range(count)]
        largest = max((size for size in sizes if len(self._times[size]) >= MIN_BATCHES), default=0)
        self._max_tried = (
            SIZES[min(bisect_left(SIZES, largest) + 1, len(SIZES) - 1)] if largest else sizes[0]
        )


def _seconds_at(points: Sequence[tuple[int, float]], size: int) -> float:
    """Return the time of a size between two measured ones, or beyond the last two."""
    if len(points) == 1:
        measured_size, seconds = points[0]
        return seconds * (1 + GROWTH_PER_REQUEST * (size / measured_size - 1))
    right = min(max(bisect_left(points, (size,)), 1), len(points) - 1)
    (low_size, low_seconds), (high_size, high_seconds) = points[right - 1 : right + 1]
    slope = (high_seconds - low_seconds) / (high_size - low_size)
    return high_seconds + (max(slope, 0.0) if size > high_size else slope) * (size - high_size)
