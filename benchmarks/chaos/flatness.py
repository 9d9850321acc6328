"""Whether what a process uses stays as it is, from looks at it over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

MIB = 1 << 20
GROWTH = 2.0  # MiB that a straight line through a process's memory may rise


class Usage(NamedTuple):
    """What one process used when it was looked at."""

    at: float  # seconds
    memory: int  # resident bytes
    files: int
    threads: int


def mib_per_hour(used: Sequence[Usage]) -> float:
    """The slope of the straight line that fits best; memory also falls, so its ends say little."""
    return (
        statistics.linear_regression(
            [each.at for each in used], [each.memory / MIB for each in used]
        ).slope
        * 3600
    )


def rising(used: Sequence[Usage]) -> list[str]:
    """What is not flat.

    Files and threads rise when there are never again as few as there were at most in the first
    third.
    """
    third = max(1, len(used) // 3)
    first, last = used[:third], used[-third:]
    hours = (used[-1].at - used[0].at) / 3600
    rises = {
        "memory": mib_per_hour(used) * hours > GROWTH,
        "files": min(each.files for each in last) > max(each.files for each in first),
        "threads": min(each.threads for each in last) > max(each.threads for each in first),
    }
    return [what for what, does in rises.items() if does]
