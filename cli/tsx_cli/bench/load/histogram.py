"""Latency histograms with buckets of 0.1 % width, like HDR histograms, so that rounds can be
merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tsx_cli.bench.load.results import Latency
from tsx_cli.bench.load.statistics import QUANTILES
from tsx_runtime.shared.quantiles import bucket_of

UNIT = 1e-7  # seconds
# a bucket holds values that are equal in so many leading bits: 2 ** 10 buckets for each doubling
BITS = 11
COARSE_BITS = 8  # of what is kept in results.json


def bucket(units: int, bits: int = BITS) -> int:
    """Small values have a bucket each; from 2 ** bits on, a bucket holds twice as many after each
    doubling.
    """
    shift = max(0, units.bit_length() - bits)
    return (shift << (bits - 1)) + (units >> shift)


def upper(index: int, bits: int = BITS) -> int:
    """The greatest value of a bucket, in units."""
    half = 1 << (bits - 1)
    shift = max(0, index // half - 1)
    return ((index - (shift << (bits - 1)) + 1) << shift) - 1


class Histogram:
    """A histogram of seconds. Mean and maximum are exact."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.total = self.greatest = 0.0

    def __len__(self) -> int:
        return sum(self.counts.values())

    def add(self, values: Sequence[float]) -> None:
        if not len(values):
            return
        import numpy as np  # what only a run needs

        seconds = np.asarray(values, dtype=np.float64)
        units = np.maximum(np.rint(seconds / UNIT), 0).astype(np.int64)
        _, exponents = np.frexp(units)  # the bit length, since units are whole and below 2 ** 53
        shifts = np.maximum(exponents.astype(np.int64) - BITS, 0)
        indices, counts = np.unique((shifts << (BITS - 1)) + (units >> shifts), return_counts=True)
        for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
            self.counts[index] += count
        self.total += float(seconds.sum())
        self.greatest = max(self.greatest, float(seconds.max()))

    def quantile(self, which: float) -> float:
        """Seconds: the upper end of the bucket that holds the smallest value that so large a share
        does not exceed; 0 of nothing.
        """
        ordered = sorted(self.counts)
        if not ordered:
            return 0.0
        index = ordered[bucket_of((self.counts[index] for index in ordered), which)]
        return min(upper(index) * UNIT, self.greatest)

    def latency(self) -> Latency:
        count = len(self)
        if not count:
            return Latency()
        quantiles = {name: 1000 * self.quantile(which) for name, which in QUANTILES.items()}
        return Latency(mean_ms=1000 * self.total / count, max_ms=1000 * self.greatest, **quantiles)

    def coarse(self) -> list[tuple[float, int]]:
        """(upper end in milliseconds, how many) of buckets 0.8 % wide."""
        counts: Counter[int] = Counter()
        for index, count in self.counts.items():
            counts[bucket(upper(index), COARSE_BITS)] += count
        return [
            (round(upper(index, COARSE_BITS) * UNIT * 1000, 6), counts[index])
            for index in sorted(counts)
        ]
