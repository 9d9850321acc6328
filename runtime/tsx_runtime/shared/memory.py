"""How much memory this server may use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def container_memory() -> int:
    """Return the bytes of memory of the machine, or the container's limit if that is lower."""
    limits = [psutil.virtual_memory().total]
    for file in LIMITS:
        with suppress(OSError, ValueError):  # another system, or "max"
            limits.append(int(file.read_text()))
    return int(min(limits))


def free_memory() -> int:
    """Return the bytes that the machine and the container's limit leave to processes.

    Cached files count as free.
    """
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        limit, current = (
            int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
        cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - current + int(cached.get("inactive_file", 0)))
    return max(0, free)
