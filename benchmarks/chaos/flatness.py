"""The growth of a process's resources, computed from samples over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

MIB = 1 << 20
MAX_GROWTH_MIB = 2.0  # allowed growth of the straight line through a process's memory


class Usage(NamedTuple):
    """The resources of a process at a moment."""

    at: float  # seconds
    memory: int  # resident bytes
    files: int
    threads: int


def mib_per_hour(samples: Sequence[Usage]) -> float:
    """Return the slope of the best straight line through all samples, since memory varies."""
    return (
        statistics.linear_regression(
            [sample.at for sample in samples], [sample.memory / MIB for sample in samples]
        ).slope
        * 3600
    )


def rising(samples: Sequence[Usage]) -> list[str]:
    """Return the names of growing resources.

    Files or threads grow if every sample of the last third exceeds all samples of the first third.
    """
    third_count = max(1, len(samples) // 3)
    first_samples, last_samples = samples[:third_count], samples[-third_count:]
    hours = (samples[-1].at - samples[0].at) / 3600
    rises = {
        "memory": mib_per_hour(samples) * hours > MAX_GROWTH_MIB,
        "files": min(sample.files for sample in last_samples)
        > max(sample.files for sample in first_samples),
        "threads": min(sample.threads for sample in last_samples)
        > max(sample.threads for sample in first_samples),
    }
    return [name for name, is_rising in rises.items() if is_rising]
