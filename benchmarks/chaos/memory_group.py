"""A control group in which the kernel kills for want of memory, where this machine lets one be made
(as root, mostly).
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
    """Counts what its processes allocate from the moment that they come in."""

    def __init__(self, directory: Path, limit_file: str, events_file: str) -> None:
        self._directory = directory
        self._limit_file = limit_file
        self._events_file = events_file

    def limit(self, size: int) -> None:
        (self._directory / self._limit_file).write_text(str(size))
        for swap, most in (
            ("memory.memsw.limit_in_bytes", size),
            ("memory.swap.max", 0),
        ):  # no swapping instead, where there is any
            with suppress(OSError):
                (self._directory / swap).write_text(str(most))

    def take(self, pid: int) -> None:
        (self._directory / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        found = KILLS.search((self._directory / self._events_file).read_text())
        return int(found[1]) if found else 0

    def remove(self) -> bool:
        """Whether it is gone, which it can only be once its processes are."""
        with suppress(OSError):
            self._directory.rmdir()
        return not self._directory.exists()


def make() -> MemoryGroup:
    """Raises OSError with the reason where none can be made."""
    reason = "no memory controller is mounted"
    for parent, limit_file, events_file in _places():
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


def why_not() -> str | None:
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


def _places() -> Iterator[tuple[Path, str, str]]:
    """Where a group may be made, with its files for the limit and for what was killed: version 1 of
    control groups, then version 2.
    """
    for line in Path(f"/proc/{os.getpid()}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield ROOT / "memory" / path.lstrip("/"), "memory.limit_in_bytes", "memory.oom_control"
        elif not controllers:
            yield ROOT / path.lstrip("/"), "memory.max", "memory.events"
            yield ROOT, "memory.max", "memory.events"
