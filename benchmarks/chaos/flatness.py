"""The growth of a process's resources, from samples over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

MIB = 1 << 20
MAX_GROWTH_MIB = 2.0  # growth of a straight line through a process's memory


class Usage(NamedTuple):
    """The resources of a process at a moment."""

    at: float  # seconds
    memory: int  # resident bytes
    files: int
    threads: int


def mib_per_hour(samples: Sequence[Usage]) -> float:
    """Return the slope of the best straight line; memory also falls, so its ends say little."""
    return (
        statistics.linear_regression(
            [sample.at for sample in samples], [sample.memory / MIB for sample in samples]
        ).slope
        * 3600
    )


def rising(samples: Sequence[Usage]) -> list[str]:
    """Return the names of growing resources.

    Files and threads grow if the last third never has as few as the first third had at most.
    """
    third = max(1, len(samples) // 3)
    first, last = samples[:third], samples[-third:]
    hours = (samples[-1].at - samples[0].at) / 3600
    rises = {
        "memory": mib_per_hour(samples) * hours > MAX_GROWTH_MIB,
        "files": min(sample.files for sample in last) > max(sample.files for sample in first),
        "threads": min(sample.threads for sample in last) > max(sample.threads for sample in first),
    }
    return [name for name, does in rises.items() if does]
