"""Histograms of durations, with fine buckets or with Prometheus's.

Fine buckets distinguish p99 values that differ by a fifth.
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

# The steps of each decade.
_STEPS: tuple[float, ...] = (1, 1.1, 1.2, 1.35, 1.5, 1.65, 1.8, 2, 2.25, 2.5, 2.75)
_STEPS += (3, 3.3, 3.6, 4, 4.5, 5, 5.5, 6, 6.6, 7.3, 8, 9)
# Bounds in seconds. Longer durations share one bucket.
FINE_BOUNDS = (*(float(f"{step}e{decade}") for decade in range(-5, 3) for step in _STEPS), 1000.0)
# Each of these is one of FINE_BOUNDS.
SHOWN_BOUNDS = (
    *(float(f"{step}e{decade}") for decade in range(-4, 2) for step in (1, 2.5, 5)),
    100.0,
)

_FRACTION_BITS = 47  # bits of a float64 after the first five of its fraction


class Exemplar(NamedTuple):
    """A request in a bucket whose trace is kept."""

    trace_id: str
    seconds: float
    at: float  # time.time()


class Buckets:
    """Finds the buckets of many durations in half the time of `searchsorted`.

    It compares the leading bits of the numbers. One step of them is at most a 32nd of the number,
    so it contains at most one bound.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        import numpy as np

        edges = np.array(bounds)
        steps = edges.view(np.int64) >> _FRACTION_BITS
        self._first = int(steps[0]) - 1  # shared by all shorter durations
        self._last = int(steps[-1]) + 1 - self._first
        self._edge = np.full(self._last + 1, np.inf)  # the bound within the step
        self._edge[steps - self._first] = edges
        # The number of bounds below the step.
        self._below = edges.searchsorted(
            ((np.arange(self._last + 1) + self._first) << _FRACTION_BITS).view(np.float64)
        )

    def positions(self, seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        import numpy as np

        steps = seconds.view(np.int64) >> _FRACTION_BITS
        steps -= self._first
        np.minimum(steps, self._last, out=steps)
        np.maximum(steps, 0, out=steps)
        positions: NDArray[np.int64] = self._below.take(steps)
        positions += seconds > self._edge.take(steps)
        return positions


_buckets = cache(Buckets)


class Durations:
    """A histogram that takes many durations at a time, which makes each one cheap."""

    __slots__ = ("_bounds", "_buckets", "_counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...] = SHOWN_BOUNDS) -> None:
        """Use the bounds FINE_BOUNDS for quantiles, else SHOWN_BOUNDS."""
        import numpy as np  # Imported late, so that importing this module is cheap.

        self._bounds = bounds
        self._buckets = _buckets(bounds)
        # One count per bucket; the last is beyond all bounds.
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0
        # The newest of each bucket, by its index in SHOWN_BOUNDS, or len(SHOWN_BOUNDS) beyond them.
        self.exemplars: dict[int, Exemplar] = {}

    def add(self, seconds: NDArray[np.float64] | Sequence[float]) -> None:
        """Count durations."""
        import numpy as np

        durations = np.asarray(seconds, np.float64)
        self._counts += np.bincount(self._buckets.positions(durations), minlength=len(self._counts))
        self.sum += float(durations.sum())

    def add_exemplar(self, exemplar: Exemplar) -> None:
        self.exemplars[bisect_left(SHOWN_BOUNDS, exemplar.seconds)] = exemplar

    def counts(self) -> tuple[int, ...]:
        """Return the counts of the buckets; a difference of two results is the time between."""
        return tuple(self._counts.tolist())

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def quantile(self, q: float) -> float | None:
        """Return a quantile in seconds since the start, or None without durations."""
        return quantile(self.counts(), q, self._bounds)

    def cumulative_counts(self) -> Iterator[int]:
        """Return the number of durations up to each bound of SHOWN_BOUNDS."""
        # The last bucket, beyond all bounds, is left out.
        below = dict(zip(self._bounds, accumulate(self.counts()), strict=False))
        return (below[bound] for bound in SHOWN_BOUNDS)


def quantile(
    counts: Sequence[int], q: float, bounds: Sequence[float] = FINE_BOUNDS
) -> float | None:
    """Return a quantile of `Durations.counts` or of a difference of two, None without durations.

    It is exact to a bucket, and a fine one is a tenth wide.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = q * total, 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            high = bounds[index] if index < len(bounds) else bounds[-1]
            return low + (high - low) * max(0.0, rank - below) / count
        below += count
    return bounds[-1]
