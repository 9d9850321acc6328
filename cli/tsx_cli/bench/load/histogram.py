"""Latency histograms that can be merged; like in HDR histograms, buckets are 0.1 % wide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tsx_cli.bench.load.results import Latency
from tsx_cli.bench.load.statistics import QUANTILES
from tsx_runtime.shared.quantiles import bucket_of

UNIT_S = 1e-7
# All values in a bucket have the same leading bits, this many. There are 2 ** 10 buckets between a
# value and its double.
BITS = 11
COARSE_BITS = 8  # bits of the histograms in results.json


def bucket(units: int, bits: int = BITS) -> int:
    """Return the index of a value's bucket.

    Each value below 2 ** bits has a bucket of its own. From there on, the width of the buckets
    doubles whenever the value doubles.
    """
    shift = max(0, units.bit_length() - bits)
    return (shift << (bits - 1)) + (units >> shift)


def upper(index: int, bits: int = BITS) -> int:
    """Return the largest value of a bucket, in units."""
    half = 1 << (bits - 1)
    shift = max(0, index // half - 1)
    return ((index - (shift << (bits - 1)) + 1) << shift) - 1


class Histogram:
    """A histogram of times in seconds; the mean and the maximum are exact."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.total = self.maximum = 0.0

    def __len__(self) -> int:
        return sum(self.counts.values())

    def add(self, values: Sequence[float]) -> None:
        if not len(values):
            return
        import numpy as np  # a slow import

        seconds = np.asarray(values, dtype=np.float64)
        units = np.maximum(np.rint(seconds / UNIT_S), 0).astype(np.int64)
        _, exponents = np.frexp(
            units
        )  # The exponent of a whole number below 2 ** 53 is its bit length.
        shifts = np.maximum(exponents.astype(np.int64) - BITS, 0)
        indices, counts = np.unique((shifts << (BITS - 1)) + (units >> shifts), return_counts=True)
        for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
            self.counts[index] += count
        self.total += float(seconds.sum())
        self.maximum = max(self.maximum, float(seconds.max()))

    def quantile(self, fraction: float) -> float:
        """Return the time that this fraction of the values does not exceed, or 0 without values.

        It is the upper end of a bucket.
        """
        sorted_indices = sorted(self.counts)
        if not sorted_indices:
            return 0.0
        index = sorted_indices[
            bucket_of((self.counts[index] for index in sorted_indices), fraction)
        ]
        return min(upper(index) * UNIT_S, self.maximum)

    def latency(self) -> Latency:
        count = len(self)
        if not count:
            return Latency()
        quantiles = {name: 1000 * self.quantile(share) for name, share in QUANTILES.items()}
        return Latency(mean_ms=1000 * self.total / count, max_ms=1000 * self.maximum, **quantiles)

    def coarse(self) -> list[tuple[float, int]]:
        """Return (upper end in milliseconds, count) for buckets of 0.8 % width."""
        counts: Counter[int] = Counter()
        for index, count in self.counts.items():
            counts[bucket(upper(index), COARSE_BITS)] += count
        return [
            (round(upper(index, COARSE_BITS) * UNIT_S * 1000, 6), counts[index])
            for index in sorted(counts)
        ]
