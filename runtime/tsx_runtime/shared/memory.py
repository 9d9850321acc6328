"""The amount of memory that this server may use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def container_memory() -> int:
    """Return the machine's memory in bytes, or the container's limit if that is lower."""
    limits = [psutil.virtual_memory().total]
    for file in LIMITS:
        with suppress(OSError, ValueError):  # The file is missing, or it contains "max".
            limits.append(int(file.read_text()))
    return int(min(limits))


def free_memory() -> int:
    """Return the free memory in bytes, within the container's limit.

    Cached files count as free.
    """
    free_bytes = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        limit, usage = (
            int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
        memory_stat = dict(
            line.split() for line in (CGROUP / "memory.stat").read_text().splitlines()
        )
        free_bytes = min(free_bytes, limit - usage + int(memory_stat.get("inactive_file", 0)))
    return max(0, free_bytes)
