"""cgroup v2 groups that limit memory, CPU time and processes, one group per worker process.

https://docs.kernel.org/admin-guide/cgroup-v2.html. Only a group without processes of its own may
hand controllers to child groups. Therefore the server needs its own group, and first moves its
processes into a child group. It gets its own group by systemd's `Delegate=yes`, root rights, or a
container with a writable /sys/fs/cgroup.
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
SERVER_GROUP = "tsx-server"  # the child group with the server's own processes
CPU_PERIOD_US = 100_000  # period over which the kernel counts CPU time
ADVICE = (
    "Start the server in its own cgroup (systemd-run --user --scope -p Delegate=yes tsx serve ...),"
    " or set isolation_cgroup"
)
# A group cannot be removed until the last of its killed processes is gone.
REMOVE_ATTEMPTS = 50
REMOVE_PAUSE_S = 0.02

_numbers = count(1)

logger = logging.getLogger("tsx.isolation")


class CgroupsUnavailable(Exception):
    """Cgroups cannot be created; the message says why, and what to do."""


def limit_files(*, memory: int, cpus: float, processes: int) -> dict[str, str]:
    """Return the texts of a group's files by name; a limit of 0 is left out.

    Args:
        memory: Megabytes.
        cpus: Cores.
        processes: Number of processes and threads.
    """
    files = {"cpu.max": f"{max(1000, int(cpus * CPU_PERIOD_US))} {CPU_PERIOD_US}"} if cpus else {}
    if memory:
        files |= {"memory.max": str(memory << 20), "memory.swap.max": "0", "memory.oom.group": "1"}
    return files | ({"pids.max": str(processes)} if processes else {})


def current_group(mounts: Path = MOUNTS, membership: Path = MEMBERSHIP) -> Path | None:
    """Return the directory of this process's group, or None if cgroup v2 is not mounted."""
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
    """Return the parent group in which groups with these files can be created.

    Args:
        parent: The configured parent group. None means this process's own group.
        files: The files of the groups, by name.

    Raises:
        CgroupsUnavailable: No such group can be created.
    """
    parent_group = parent or current_group()
    if parent_group is None:
        raise CgroupsUnavailable("cgroup v2 is not mounted here")
    if parent_group.name == SERVER_GROUP:
        parent_group = parent_group.parent  # An earlier call has moved the processes.
    controllers = sorted({name.partition(".")[0] for name in files})
    try:
        available = (parent_group / "cgroup.controllers").read_text().split()
        if missing := [name for name in controllers if name not in available]:
            raise CgroupsUnavailable(
                f"{parent_group} has no controller {' or '.join(missing)}. {ADVICE}"
            )
        # The root group, which alone has no type file, may keep its processes.
        if parent is None and (parent_group / "cgroup.type").exists():
            _move_own_processes(parent_group)
        (parent_group / "cgroup.subtree_control").write_text(
            " ".join(f"+{name}" for name in controllers)
        )
        # Creating a group tests whether this process may do so.
        Group(parent_group, {}).remove()
    except OSError as error:
        raise CgroupsUnavailable(
            f"cgroups cannot be created in {parent_group}: {error.strerror}. {ADVICE}"
        ) from error
    return parent_group


def _move_own_processes(parent_group: Path) -> None:
    pids = [int(pid) for pid in (parent_group / "cgroup.procs").read_text().split()]
    server_pids = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    if foreign_pids := sorted(set(pids) - server_pids):
        raise CgroupsUnavailable(
            f"{parent_group} contains processes that do not belong to the server"
            f" ({', '.join(map(str, foreign_pids[:5]))}). {ADVICE}"
        )
    if pids:
        server_group = parent_group / SERVER_GROUP
        server_group.mkdir(exist_ok=True)
        for pid in pids:
            with suppress(ProcessLookupError):
                (server_group / "cgroup.procs").write_text(str(pid))


class Group:
    """The group of one worker, which the process joins before it runs anything else.

    The constructor raises OSError.
    """

    def __init__(self, parent: Path, files: Mapping[str, str]) -> None:
        self.path = parent / f"tsx-worker-{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()
        try:
            for name, text in files.items():
                if (
                    name in ("memory.swap.max", "memory.oom.group")
                    and not (self.path / name).exists()
                ):
                    # The system does not account for swap, or is older than Linux 4.19.
                    continue
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
        """Kill the processes of the group, and remove it; this may block for a second."""
        if (kill := self.path / "cgroup.kill").exists():  # since Linux 5.14
            with suppress(OSError):
                kill.write_text("1")
        for _ in range(REMOVE_ATTEMPTS):
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(REMOVE_PAUSE_S)
            else:
                return
        logger.warning("the cgroup %s cannot be removed: it still contains processes", self.path)
