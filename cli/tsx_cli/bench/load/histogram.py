"""Latency histograms with buckets of 0.1 % width, like HDR histograms, which can be merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tsx_cli.bench.load.results import Latency
from tsx_cli.bench.load.statistics import QUANTILES
from tsx_runtime.shared.quantiles import bucket_of

UNIT_S = 1e-7
# The values of a bucket agree in this many leading bits: 2 ** 10 buckets for each doubling.
BITS = 11
COARSE_BITS = 8  # bits of the histograms in results.json


def bucket(units: int, bits: int = BITS) -> int:
    """Return the index of a value's bucket.

    Small values have a bucket each. From 2 ** bits on, buckets double in width with each doubling
    of the value.
    """
    shift = max(0, units.bit_length() - bits)
    return (shift << (bits - 1)) + (units >> shift)


def upper(index: int, bits: int = BITS) -> int:
    """Return the greatest value of a bucket, in units."""
    half = 1 << (bits - 1)
    shift = max(0, index // half - 1)
    return ((index - (shift << (bits - 1)) + 1) << shift) - 1


class Histogram:
    """A histogram of seconds; mean and maximum are exact."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.total = self.greatest = 0.0

    def __len__(self) -> int:
        return sum(self.counts.values())

    def add(self, values: Sequence[float]) -> None:
        if not len(values):
            return
        import numpy as np  # Only a run needs it.

        seconds = np.asarray(values, dtype=np.float64)
        units = np.maximum(np.rint(seconds / UNIT_S), 0).astype(np.int64)
        _, exponents = np.frexp(units)  # The bit length: units are whole and below 2 ** 53.
        shifts = np.maximum(exponents.astype(np.int64) - BITS, 0)
        indices, counts = np.unique((shifts << (BITS - 1)) + (units >> shifts), return_counts=True)
        for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
            self.counts[index] += count
        self.total += float(seconds.sum())
        self.greatest = max(self.greatest, float(seconds.max()))

    def quantile(self, share: float) -> float:
        """Return the seconds that this share of the values does not exceed; 0 without a value.

        They are the upper end of a bucket.
        """
        ordered = sorted(self.counts)
        if not ordered:
            return 0.0
        index = ordered[bucket_of((self.counts[index] for index in ordered), share)]
        return min(upper(index) * UNIT_S, self.greatest)

    def latency(self) -> Latency:
        count = len(self)
        if not count:
            return Latency()
        quantiles = {name: 1000 * self.quantile(share) for name, share in QUANTILES.items()}
        return Latency(mean_ms=1000 * self.total / count, max_ms=1000 * self.greatest, **quantiles)

    def coarse(self) -> list[tuple[float, int]]:
        """Return (upper end in milliseconds, count) of buckets 0.8 % wide."""
        counts: Counter[int] = Counter()
        for index, count in self.counts.items():
            counts[bucket(upper(index), COARSE_BITS)] += count
        return [
            (round(upper(index, COARSE_BITS) * UNIT_S * 1000, 6), counts[index])
            for index in sorted(counts)
        ]
