"""How much memory this server may use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def container_memory() -> int:
    """The memory of the machine, or the container's limit."""
    found = [psutil.virtual_memory().total]
    for file in LIMITS:
        with suppress(OSError, ValueError):  # another system, or no limit
            found.append(int(file.read_text()))
    return int(min(found))


def free_memory() -> int:
    """What processes may still take: of the machine, and of the container's limit.

    Files that the system caches count as free.
    """
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        limit, current = (
            int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
        cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - current + int(cached.get("inactive_file", 0)))
    return max(0, free)
