"""cgroup v2 groups that limit memory, CPU time and number of processes of isolated workers: one
group per worker process.

https://docs.kernel.org/admin-guide/cgroup-v2.html. Only a group without processes of its own may
hand controllers to groups below it. So a server that was given its group (systemd: `Delegate=yes`;
root; a container whose /sys/fs/cgroup can be written) moves its own processes into a group below,
once, before it makes the others.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil

MOUNTS = Path("/proc/self/mountinfo")
MEMBERSHIP = Path("/proc/self/cgroup")
SERVER = "tsx-server"  # the group that the server's own processes are moved to
PERIOD = 100_000  # microseconds over which CPU time is counted
ADVICE = (
    "Start the server in its own cgroup (systemd-run --user --scope -p Delegate=yes tsx serve ...),"
    " or set isolation_cgroup"
)
REMOVE_TRIES = 50  # a group is busy until the last of its processes, which were killed, is gone
REMOVE_PAUSE = 0.02

_numbers = count(1)

logger = logging.getLogger("tsx.isolation")


class NoGroups(Exception):
    """Cgroups cannot be created; the message says why, and what to do."""


def bounds(*, memory: int, cpus: float, processes: int) -> dict[str, str]:
    """The files of a group, by name, that say so. `memory` in megabytes; what is 0 is not
    bounded.
    """
    files = {"cpu.max": f"{max(1000, int(cpus * PERIOD))} {PERIOD}"} if cpus else {}
    if memory:
        files |= {"memory.max": str(memory << 20), "memory.swap.max": "0", "memory.oom.group": "1"}
    return files | ({"pids.max": str(processes)} if processes else {})


def own_group(mounts: Path = MOUNTS, membership: Path = MEMBERSHIP) -> Path | None:
    """The directory of this process's group in cgroup v2; None where that is not mounted."""
    try:
        mount = next(
            (line.split()[4] for line in mounts.read_text().splitlines() if " - cgroup2 " in line),
            None,
        )
        path = next(
            (line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")),
            None,
        )
    except OSError:
        return None
    return None if mount is None or path is None else Path(mount) / path.lstrip("/")


def prepare(parent: Path | None, files: Mapping[str, str]) -> Path:
    """The group below which groups with these files can be made: `parent`, or this process's own.
    Raises NoGroups.
    """
    place = parent or own_group()
    if place is None:
        raise NoGroups("cgroup v2 is not mounted here")
    if place.name == SERVER:
        place = place.parent  # moved before
    wanted = sorted({name.partition(".")[0] for name in files})
    try:
        there = (place / "cgroup.controllers").read_text().split()
        if missing := [name for name in wanted if name not in there]:
            raise NoGroups(f"{place} has no controller {' or '.join(missing)}. {ADVICE}")
        if (
            parent is None and (place / "cgroup.type").exists()
        ):  # of all groups but the system's first
            _move_own_processes(place)
        (place / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
        Group(place, {}).remove()  # whether it can be written
    except OSError as error:
        raise NoGroups(
            f"cgroups cannot be created in {place}: {error.strerror}. {ADVICE}"
        ) from error
    return place


def _move_own_processes(place: Path) -> None:
    pids = [int(pid) for pid in (place / "cgroup.procs").read_text().split()]
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    if strangers := sorted(set(pids) - own):
        raise NoGroups(
            f"{place} contains processes that do not belong to the server"
            f" ({', '.join(map(str, strangers[:5]))}). {ADVICE}"
        )
    if pids:
        below = place / SERVER
        below.mkdir(exist_ok=True)
        for pid in pids:
            with suppress(ProcessLookupError):
                (below / "cgroup.procs").write_text(str(pid))


class Group:
    """One worker's process joins it before it runs anything. Raises OSError."""

    def __init__(self, parent: Path, files: Mapping[str, str]) -> None:
        self.path = parent / f"tsx-worker-{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()
        try:
            for name, text in files.items():
                if (
                    name in ("memory.swap.max", "memory.oom.group")
                    and not (self.path / name).exists()
                ):
                    continue  # a system that does not account for swap, or is older than 4.19
                (self.path / name).write_text(text)
        except BaseException:
            self.remove()
            raise

    def ran_out_of_memory(self) -> bool:
        try:
            events = dict(
                line.split() for line in (self.path / "memory.events").read_text().splitlines()
            )
        except (OSError, ValueError):
            return False
        return int(events.get("oom_kill", 0)) > 0

    def remove(self) -> None:
        """Kill what is left in it. Blocks for a moment."""
        if (kill := self.path / "cgroup.kill").exists():  # Linux 5.14
            with suppress(OSError):
                kill.write_text("1")
        for _ in range(REMOVE_TRIES):
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(REMOVE_PAUSE)
            else:
                return
        logger.warning("the cgroup %s cannot be removed: it still contains processes", self.path)
