"""Histograms of durations, with fine buckets or with the ones that `/metrics` shows.

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

# The bounds in each decade.
_STEPS: tuple[float, ...] = (1, 1.1, 1.2, 1.35, 1.5, 1.65, 1.8, 2, 2.25, 2.5, 2.75)
_STEPS += (3, 3.3, 3.6, 4, 4.5, 5, 5.5, 6, 6.6, 7.3, 8, 9)
# Bounds in seconds. All longer durations are in one more bucket.
FINE_BOUNDS = (*(float(f"{step}e{decade}") for decade in range(-5, 3) for step in _STEPS), 1000.0)
# A subset of FINE_BOUNDS.
SHOWN_BOUNDS = (
    *(float(f"{step}e{decade}") for decade in range(-4, 2) for step in (1, 2.5, 5)),
    100.0,
)

_FRACTION_BITS = 47  # A step has the float64's bits except for these last ones.


class Exemplar(NamedTuple):
    """A request in a bucket, with the id of its trace, which is kept."""

    trace_id: str
    seconds: float
    at: float  # time.time()


class Buckets:
    """Finds the buckets of many durations in half the time of `searchsorted`.

    It compares the leading bits of the numbers. All numbers with the same leading bits (a step)
    differ by at most a 32nd, so there is at most one bound among them.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        import numpy as np

        edges = np.array(bounds)
        steps = edges.view(np.int64) >> _FRACTION_BITS
        self._first = int(steps[0]) - 1  # the step of all shorter durations
        self._last = int(steps[-1]) + 1 - self._first
        self._edge = np.full(self._last + 1, np.inf)  # the bound within each step
        self._edge[steps - self._first] = edges
        # The number of bounds below each step.
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
    """A histogram that counts many durations at a time, which makes each one cheap."""

    __slots__ = ("_bounds", "_buckets", "_counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...] = SHOWN_BOUNDS) -> None:
        """Use FINE_BOUNDS for exact quantiles, or SHOWN_BOUNDS."""
        import numpy as np  # Importing it here keeps the import of this module fast.

        self._bounds = bounds
        self._buckets = _buckets(bounds)
        # One count per bucket; the last bucket is beyond all bounds.
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0
        # The newest exemplar by bucket: an index of SHOWN_BOUNDS, or len(SHOWN_BOUNDS) beyond them.
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
        """Return the counts of the buckets; a difference of two results covers the time between."""
        return tuple(self._counts.tolist())

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def quantile(self, q: float) -> float | None:
        """Return a quantile of all durations in seconds, or None without durations."""
        return quantile(self.counts(), q, self._bounds)

    def cumulative_counts(self) -> Iterator[int]:
        """Return the number of durations up to each bound of SHOWN_BOUNDS."""
        # The last bucket, beyond all bounds, is left out.
        below = dict(zip(self._bounds, accumulate(self.counts()), strict=False))
        return (below[bound] for bound in SHOWN_BOUNDS)


def quantile(
    counts: Sequence[int], q: float, bounds: Sequence[float] = FINE_BOUNDS
) -> float | None:
    """Return a quantile of `Durations.counts`, or of a difference of two; None without durations.

    It lies in the right bucket; a fine bucket is a tenth wide.
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
