"""Histograms of durations: with fine buckets, which distinguish p99 values that differ by a fifth,
or with Prometheus's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_STEPS = (
    1,
    1.1,
    1.2,
    1.35,
    1.5,
    1.65,
    1.8,
    2,
    2.25,
    2.5,
    2.75,
    3,
    3.3,
    3.6,
    4,
    4.5,
    5,
    5.5,
    6,
    6.6,
    7.3,
    8,
    9,
)  # of each decade
FINE = (
    *(float(f"{step}e{decade}") for decade in range(-5, 3) for step in _STEPS),
    1000.0,
)  # seconds; what took longer has one bucket
SHOWN = (
    *(float(f"{step}e{decade}") for decade in range(-4, 2) for step in (1, 2.5, 5)),
    100.0,
)  # each is one of FINE

_REST = 47  # bits of a float64 behind the first five of its fraction


class Exemplar(NamedTuple):
    """A request that fell into a bucket, and whose trace is kept."""

    trace_id: str
    seconds: float
    at: float  # time.time()


class Buckets:
    """Finds the bucket of each of many durations in half the time of `searchsorted`: by the leading
    bits of the number.

    A step of them is a 32nd at most, so that there is one bound within it or none.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        import numpy as np

        edges = np.array(bounds)
        steps = edges.view(np.int64) >> _REST
        self._first = int(steps[0]) - 1  # what is shorter has this step too
        self._last = int(steps[-1]) + 1 - self._first
        self._edge = np.full(self._last + 1, np.inf)  # the bound within the step
        self._edge[steps - self._first] = edges
        self._below = edges.searchsorted(
            ((np.arange(self._last + 1) + self._first) << _REST).view(np.float64)
        )  # bounds below the step

    def of(self, seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        import numpy as np

        steps = seconds.view(np.int64) >> _REST
        steps -= self._first
        np.minimum(steps, self._last, out=steps)
        np.maximum(steps, 0, out=steps)
        found: NDArray[np.int64] = self._below.take(steps)
        found += seconds > self._edge.take(steps)
        return found


_buckets = cache(Buckets)


class Durations:
    """A histogram, which is added to many at a time: then one costs little."""

    __slots__ = ("_bounds", "_buckets", "_counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...] = SHOWN) -> None:
        """`bounds`: FINE where quantiles are asked for, else SHOWN."""
        import numpy as np  # here: importing this module costs nothing

        self._bounds = bounds
        self._buckets = _buckets(bounds)
        self._counts = np.zeros(
            len(bounds) + 1, np.int64
        )  # each for itself, the last beyond all bounds
        self.sum = 0.0
        self.exemplars: dict[
            int, Exemplar
        ] = {}  # the newest, by the position in SHOWN; beyond them all: its length

    def add(self, seconds: NDArray[np.float64] | Sequence[float]) -> None:
        """How long each of many took."""
        import numpy as np

        took = np.asarray(seconds, np.float64)
        self._counts += np.bincount(self._buckets.of(took), minlength=len(self._counts))
        self.sum += float(took.sum())

    def point_out(self, exemplar: Exemplar) -> None:
        self.exemplars[bisect_left(SHOWN, exemplar.seconds)] = exemplar

    def counts(self) -> tuple[int, ...]:
        """As they are now, to be compared with later ones: the difference says what happened
        between the two.
        """
        return tuple(self._counts.tolist())

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def quantile(self, q: float) -> float | None:
        """Since the start; seconds."""
        return quantile(self.counts(), q, self._bounds)

    def shown(self) -> Iterator[int]:
        """For each of SHOWN, how many were not longer."""
        below = dict(
            zip(self._bounds, accumulate(self.counts()), strict=False)
        )  # the last bucket is beyond all bounds
        return (below[bound] for bound in SHOWN)


def quantile(counts: Sequence[int], q: float, bounds: Sequence[float] = FINE) -> float | None:
    """Of what `counts` hold (`Durations.counts`), or the difference of two of them.

    Exact to a bucket: the fine ones are a tenth wide.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = q * total, 0
    for place, count in enumerate(counts):
        if count and below + count >= rank:
            low = bounds[place - 1] if place else 0.0
            high = bounds[place] if place < len(bounds) else bounds[-1]
            return low + (high - low) * max(0.0, rank - below) / count
        below += count
    return bounds[-1]
