"""How much memory this server may use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def container_memory() -> int:
    """The memory of the machine, or the container's limit."""
    found = [psutil.virtual_memory().total]
    for file in LIMITS:
        with suppress(OSError, ValueError):  # another system, or no limit
            found.append(int(file.read_text()))
    return int(min(found))
