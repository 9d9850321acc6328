"""The machine of a benchmark: what it is, what else happens on it while something is measured, and
whether that disturbed the measurement.

Counters are read from /proc and /sys on Linux; elsewhere psutil has the processes and the use of
the cores.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import psutil

from tsx_cli.bench.load.results import (
    Curve,
    Disturbed,
    Environment,
    Noise,
    Point,
    Round,
    Trial,
    counted,
)
from tsx_cli.bench.load.statistics import machine_noise
from tsx_runtime.core.placement.hardware import hardware
from tsx_runtime.version import __version__

OTHERS = 0.05  # of the cores: what other processes may use
STEAL = THROTTLED = 0.02  # of the time
MEMORY, IO = 0.05, 0.1  # of the time that some task may wait for them
PROBE = 1.25  # times as long as the fastest probe of the run
MOST = 3.0  # times: what other processes took is corrected by no more
FEW = 0.3  # of the rounds: those that may be measured again
LATEST = 6  # rounds by which the disturbance is called permanent


def judge(noise: Noise, cores: int) -> list[str]:
    """By what a measurement was disturbed, each with its figure and its limit; nothing where it was
    quiet.

    The pressure on the CPU is no reason: the measured server causes it by itself as soon as it has
    more workers than cores.
    """
    most, memory = (
        f", most by {noise.busiest}" if noise.busiest else "",
        noise.memory_pressure or 0.0,
    )
    found = [
        (
            noise.others > OTHERS * cores,
            f"other processes used {noise.others:.2g} cores (limit {OTHERS * cores:.2g}{most})",
        ),
        (
            noise.steal > STEAL,
            f"the hypervisor took {noise.steal:.0%} of the time (limit {STEAL:.0%})",
        ),
        (
            noise.throttled > THROTTLED,
            (
                f"the container's CPU quota was used up {noise.throttled:.0%} of the time (limit"
                f" {THROTTLED:.0%})"
            ),
        ),
        (memory > MEMORY, f"tasks waited for memory {memory:.0%} of the time (limit {MEMORY:.0%})"),
        (
            (noise.io_pressure or 0) > IO,
            f"tasks waited for a disk {noise.io_pressure or 0:.0%} of the time (limit {IO:.0%})",
        ),
        (
            noise.heat > 0,
            f"a core was slowed down for its temperature {noise.heat} times (limit 0)",
        ),
        (
            (noise.probe or 0) > PROBE,
            (
                f"a fixed computation took {noise.probe or 0:.2f} times as long as at best (limit"
                f" {PROBE})"
            ),
        ),
    ]
    return [text for is_so, text in found if is_so]


def again(disturbed: Sequence[bool], seconds_left: float, cost: float) -> bool:
    """Whether the last round is measured again at once: not where most rounds are disturbed, as
    another one would be as well.
    """
    latest = disturbed[-LATEST:]
    permanent = len(latest) > 2 and sum(latest) > len(latest) / 2
    return (
        bool(latest and latest[-1])
        and not permanent
        and sum(disturbed) <= max(2, FEW * len(disturbed))
        and seconds_left >= cost
    )


def correction(each: Round | Curve) -> float:
    """How many times as fast a disturbed measurement would have been, if the server had got all the
    cores that it was ready to use.

    So that configurations can be compared although some shared the machine with more than others.
    Other processes took no more than what they used, and no longer than a task waited for a core.
    """
    noise = each.noise
    if noise is None or not each.disturbed or noise.cores <= 0:
        return 1.0
    taken = noise.others if noise.cpu_pressure is None else min(noise.others, noise.cpu_pressure)
    return min(MOST, (noise.cores + taken) / noise.cores / max(0.1, 1 - noise.steal))


def worth(point: Point) -> float:
    """The throughput by which configurations are compared: as measured, but for what took cores
    from a disturbed round.
    """
    return (
        point.throughput.value * fmean(map(correction, point.counted))
        if point.rounds
        else point.throughput.value
    )


def summary(trials: Iterable[Trial]) -> Disturbed:
    """Of all rounds."""
    points = [point.rounds for trial in trials for point in trial.points]
    rounds = [each for point in points for each in point]
    bad = [each for each in rounds if each.disturbed]
    if not bad:
        return Disturbed(rounds=len(rounds))
    again = sum(len(point) - len(counted(point)) for point in points)
    others = median([each.noise.others for each in bad if each.noise is not None] or [0.0])
    were = "was" if len(bad) == 1 else "were"
    what = (
        f"by other processes (median {others:.1f} cores)"
        if others >= 0.05
        else f"({bad[0].disturbed[0]})"
    )
    dealt = f"{again} {'was' if again == 1 else 'were'} repeated"
    if len(bad) == len(rounds):
        dealt = (
            "so configurations were compared by their throughput for the processor time that"
            " they got"
        )
    elif not again:
        dealt = "none was repeated, and they are marked"
    says = f"{len(bad)} of {len(rounds)} rounds {were} disturbed {what}; {dealt}"
    return Disturbed(
        rounds=len(rounds), disturbed=len(bad), repeated=again, others=others, says=says
    )


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


NOISY = 0.05  # of a fixed computation; beyond it the report says so


def environment(*, noise: bool = True) -> Environment:
    """With `noise` it takes half a second, in which nothing else should run."""
    here = hardware()
    return Environment(
        fingerprint=here.fingerprint,
        cpu=here.cpu,
        cores=here.cores,
        memory_mib=psutil.virtual_memory().total >> 20,
        gpus=list(here.gpus),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=_version("torch"),
        tsx=__version__,
        noise=machine_noise() if noise else None,
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
