"""A control group with a memory limit, in which the kernel kills processes that exceed it.

Making one usually needs root.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryGroup:
    """A control group; it counts the memory that processes allocate after they enter."""

    def __init__(self, directory: Path, limit_file: str, events_file: str) -> None:
        self._directory = directory
        self._limit_file = limit_file
        self._events_file = events_file

    def limit(self, size: int) -> None:
        (self._directory / self._limit_file).write_text(str(size))
        # Turn off swapping, if the group controls it.
        for swap, value in (("memory.memsw.limit_in_bytes", size), ("memory.swap.max", 0)):
            with suppress(OSError):
                (self._directory / swap).write_text(str(value))

    def take(self, pid: int) -> None:
        (self._directory / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        match = KILLS.search((self._directory / self._events_file).read_text())
        return int(match[1]) if match else 0

    def remove(self) -> bool:
        """Remove the group, which must have no processes; return whether this succeeded."""
        with suppress(OSError):
            self._directory.rmdir()
        return not self._directory.exists()


def make() -> MemoryGroup:
    """Make a control group.

    Raises:
        OSError: No group can be made; the text is the reason.
    """
    reason = "no memory controller is mounted"
    for parent, limit_file, events_file in _candidates():
        directory = parent / f"chaos-{uuid.uuid4().hex}"
        try:
            directory.mkdir()
        except OSError as error:
            reason = str(error)
            continue
        if (directory / limit_file).exists() and (directory / events_file).exists():
            return MemoryGroup(directory, limit_file, events_file)
        directory.rmdir()
    raise OSError(f"no memory control group can be made: {reason}")


def unavailable_reason() -> str | None:
    try:
        make().remove()
    except OSError as error:
        return str(error)
    return None


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    group = make()
    try:
        group.limit(limit)
        yield group
    finally:
        group.remove()


def _candidates() -> Iterator[tuple[Path, str, str]]:
    """Yield possible parents of a group, with the names of its files for the limit and the kills.

    Parents of cgroup v1 come first, then those of cgroup v2.
    """
    for line in Path(f"/proc/{os.getpid()}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield ROOT / "memory" / path.lstrip("/"), "memory.limit_in_bytes", "memory.oom_control"
        elif not controllers:
            yield ROOT / path.lstrip("/"), "memory.max", "memory.events"
            yield ROOT, "memory.max", "memory.events"
