"""Reads what else happens on the machine while something is measured: counters before and after,
and a short probe.

On Linux from /proc and /sys; elsewhere psutil has the processes and the use of the cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from tsx_cli.bench.model.results import Noise

PROBES = 5  # of which the median counts
KERNEL = 2  # the parent of all kernel threads
PRESSURES = ("cpu", "memory", "io")


class UsedTime(NamedTuple):
    name: str
    parent: int
    seconds: float  # of a core, with those of children that have ended


class MachineCounters(NamedTuple):
    """Counters at a moment; all are seconds but `heat`.

    `processes` is None where those of other users cannot be read.
    """

    at: float
    mine: Mapping[int, UsedTime]
    processes: Mapping[int, UsedTime] | None
    busy: float  # of the cores, by processes
    stolen: float = 0.0
    cores: int = 1
    throttled: float = 0.0
    pressure: Mapping[str, float] = {}
    heat: int = 0
    partial: bool = False  # whether the cores are those of the benchmark only, and there are others


def read(
    root: Path = Path("/"), own: int | None = None, cores: Collection[int] = ()
) -> MachineCounters:
    """Takes a few milliseconds.

    `own` is the process whose whole family belongs to the benchmark, `cores` are those that it may
    use.
    """
    own = own or os.getpid()
    stat = _lines(root / "proc/stat")
    if not stat:
        return _by_psutil(own)
    processes = _processes(root / "proc")
    there = [line[3:].split() for line in stat if line.startswith("cpu") and line[3:4].isdigit()]
    used = [core for core in there if int(core[0]) in cores] or there
    ticks = [list(map(int, core[1:])) for core in used]
    second = os.sysconf("SC_CLK_TCK")
    heat = sum(
        int(_text(file) or 0)
        for file in root.glob(
            "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count"
        )
    )
    return MachineCounters(
        time.monotonic(),
        _family(processes, own),
        processes if 1 in processes else None,
        sum(sum(core[:3]) for core in ticks) / second,
        sum(core[7] for core in ticks if len(core) > 7) / second,
        max(1, len(ticks)),
        _throttled(root),
        {
            name: found
            for name in PRESSURES
            if (found := _pressure(root / "proc/pressure" / name)) is not None
        },
        heat,
        len(used) < len(there),
    )


def between(before: MachineCounters, after: MachineCounters, probe: float | None = None) -> Noise:
    """What happened between two readings."""
    took = max(after.at - before.at, 1e-6)
    own = max(0.0, _total(after.mine) - _total(before.mine))
    rest = max(0.0, after.busy - before.busy - own)
    if before.processes is None or after.processes is None:
        others, busiest = rest, ""
    else:
        families = before.mine.keys() | after.mine.keys()
        first, last = (
            {pid: each for pid, each in all_.items() if pid not in families}
            for all_ in (before.processes, after.processes)
        )
        others = max(0.0, _total(last) - _total(first))
        used = {
            pid: each.seconds - (first[pid].seconds if pid in first else 0.0)
            for pid, each in last.items()
        }
        top = max(used, key=lambda pid: used[pid], default=None)
        busiest = last[top].name if top is not None and used[top] > 0.01 * took else ""
        if after.partial:  # which of them ran on those cores is not known
            others, busiest = min(others, rest), ""
    pressure = {
        name: (after.pressure[name] - before.pressure[name]) / took
        for name in after.pressure
        if name in before.pressure
    }
    frequency = None
    with suppress(OSError, NotImplementedError, AttributeError):
        found = psutil.cpu_freq()
        frequency = None if found is None or not found.current else found.current
    return Noise(
        cores=own / took,
        others=others / took,
        busiest=busiest,
        steal=max(0.0, after.stolen - before.stolen) / took / after.cores,
        throttled=min(1.0, max(0.0, after.throttled - before.throttled) / took),
        cpu_pressure=pressure.get("cpu"),
        memory_pressure=pressure.get("memory"),
        io_pressure=pressure.get("io"),
        heat=max(0, after.heat - before.heat),
        mhz=frequency,
        probe=probe,
    )


class Watch:
    """As long as its context lasts; `noise` is there afterwards. `fastest` are the probes of a run,
    which all watches of it share.

    Other processes count on the cores that this process may use, and on `more` that the benchmark
    uses.
    """

    def __init__(self, fastest: list[float], more: Iterable[int] = ()) -> None:
        self.noise = Noise()
        self._fastest = fastest
        self._cores = {
            *more,
            *(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()),
        }

    def __enter__(self) -> Watch:
        self._first = probe()
        self._before = read(cores=self._cores)
        return self

    def __exit__(self, *error: object) -> None:
        after, last = read(cores=self._cores), probe()
        self._fastest[:] = [min(*self._fastest, self._first, last)]
        self.noise = between(self._before, after, max(self._first, last) / self._fastest[0])


def probe() -> float:
    """Seconds of a fixed computation."""
    times = []
    for _ in range(PROBES):
        started = time.perf_counter()
        sum(number * number for number in range(50_000))
        times.append(time.perf_counter() - started)
    return median(times)


def _processes(proc: Path) -> dict[int, UsedTime]:
    """All but the kernel's threads.

    A process that ends meanwhile is left out; its parent has its time.
    """
    second, found = os.sysconf("SC_CLK_TCK"), {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):
            head, _, rest = (entry / "stat").read_text(errors="replace").rpartition(")")
            fields = rest.split()
            pid, parent = int(entry.name), int(fields[1])
            if KERNEL not in (pid, parent):
                found[pid] = UsedTime(
                    head.partition("(")[2], parent, sum(map(int, fields[11:15])) / second
                )
    return found


def _family(processes: Mapping[int, UsedTime], own: int) -> dict[int, UsedTime]:
    def belongs(pid: int) -> bool:
        while pid != own and pid in processes:
            pid = processes[pid].parent
        return pid == own

    return {pid: each for pid, each in processes.items() if belongs(pid)}


def _total(processes: Mapping[int, UsedTime]) -> float:
    return sum(each.seconds for each in processes.values())


def _throttled(root: Path) -> float:
    """Seconds in which this process's control group waited for its CPU quota (version 1 counts
    nanoseconds, version 2 microseconds).
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for place in (
            f"{controllers}{path}",
            f"cpu{path}",
            path.lstrip("/"),
            controllers,
            "cpu",
            "",
        ):
            for line in _lines(root / "sys/fs/cgroup" / place.lstrip("/") / "cpu.stat"):
                name, _, value = line.partition(" ")
                if name in ("throttled_usec", "throttled_time"):
                    return int(value) / (1e6 if name == "throttled_usec" else 1e9)
    return 0.0


def _pressure(file: Path) -> float | None:
    """Seconds in which some task waited; None where the kernel does not count them."""
    some = next((line for line in _lines(file) if line.startswith("some ")), "")
    return int(some.rpartition("total=")[2]) / 1e6 if "total=" in some else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _lines(file: Path) -> list[str]:
    return _text(file).splitlines()


def _by_psutil(own: int) -> MachineCounters:
    times, family = psutil.cpu_times(), {}
    with suppress(psutil.Error):
        for process in [psutil.Process(own), *psutil.Process(own).children(recursive=True)]:
            with suppress(psutil.Error):
                used = process.cpu_times()
                family[process.pid] = UsedTime("", 0, used.user + used.system)
    ended = os.times()  # by which processes of this one that have ended are known everywhere
    family[0] = UsedTime("", 0, ended.children_user + ended.children_system)
    return MachineCounters(
        time.monotonic(),
        family,
        None,
        times.user + times.system + getattr(times, "nice", 0.0),
        cores=os.cpu_count() or 1,
    )
