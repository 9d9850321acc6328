"""The machine of a benchmark, and disturbances by other activity on it.

On Linux, counters are read from /proc and /sys. On other systems, psutil provides the processes and
the use of the cores.
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

MAX_OTHER_CORES = 0.05  # use by other processes, as a fraction of the cores
MAX_STEAL = MAX_THROTTLED = 0.02  # fractions of the time
MAX_MEMORY_WAIT, MAX_IO_WAIT = 0.05, 0.1  # fractions of the time in which some task waited
MAX_PROBE_RATIO = 1.25  # ratio to the fastest probe of the run
MAX_CORRECTION = 3.0  # largest correction for other processes
MAX_REPEATED_SHARE = 0.3  # fraction of the rounds that may be repeated
RECENT_ROUNDS = 6  # rounds that show whether a disturbance is permanent


def judge(noise: Noise, cores: int) -> list[str]:
    """Return the disturbances of a measurement, each with its figure and its limit.

    CPU pressure is not a disturbance: the measured server causes it itself if it has more workers
    than cores.
    """
    busiest = f", most by {noise.busiest}" if noise.busiest else ""
    memory = noise.memory_pressure or 0.0
    checks = [
        (
            noise.others > MAX_OTHER_CORES * cores,
            (
                f"other processes used {noise.others:.2g} cores (limit"
                f" {MAX_OTHER_CORES * cores:.2g}{busiest})"
            ),
        ),
        (
            noise.steal > MAX_STEAL,
            f"the hypervisor took {noise.steal:.0%} of the time (limit {MAX_STEAL:.0%})",
        ),
        (
            noise.throttled > MAX_THROTTLED,
            (
                f"the container's CPU quota was used up {noise.throttled:.0%} of the time (limit"
                f" {MAX_THROTTLED:.0%})"
            ),
        ),
        (
            memory > MAX_MEMORY_WAIT,
            f"tasks waited for memory {memory:.0%} of the time (limit {MAX_MEMORY_WAIT:.0%})",
        ),
        (
            (noise.io_pressure or 0) > MAX_IO_WAIT,
            (
                f"tasks waited for a disk {noise.io_pressure or 0:.0%} of the time (limit"
                f" {MAX_IO_WAIT:.0%})"
            ),
        ),
        (
            noise.heat > 0,
            f"a core was slowed down for its temperature {noise.heat} times (limit 0)",
        ),
        (
            (noise.probe or 0) > MAX_PROBE_RATIO,
            (
                f"a fixed computation took {noise.probe or 0:.2f} times as long as at best (limit"
                f" {MAX_PROBE_RATIO})"
            ),
        ),
    ]
    return [text for is_disturbed, text in checks if is_disturbed]


def should_repeat(disturbed: Sequence[bool], seconds_left: float, cost: float) -> bool:
    """Tell whether the last round should be repeated immediately.

    If most rounds are disturbed, a repetition would be disturbed too, so it is pointless.
    """
    recent = disturbed[-RECENT_ROUNDS:]
    is_permanent = len(recent) > 2 and sum(recent) > len(recent) / 2
    return (
        bool(recent and recent[-1])
        and not is_permanent
        and sum(disturbed) <= max(2, MAX_REPEATED_SHARE * len(disturbed))
        and seconds_left >= cost
    )


def correction(measurement: Round | Curve) -> float:
    """Return by how much faster a disturbed measurement would have been with all its cores.

    This makes configurations comparable even if other processes used some cores during only some of
    the measurements. The processes took at most the core time that they used, and at most the time
    in which tasks waited for a core.
    """
    noise = measurement.noise
    if noise is None or not measurement.disturbed or noise.cores <= 0:
        return 1.0
    taken_cores = (
        noise.others if noise.cpu_pressure is None else min(noise.others, noise.cpu_pressure)
    )
    return min(
        MAX_CORRECTION, (noise.cores + taken_cores) / noise.cores / max(0.1, 1 - noise.steal)
    )


def comparable_throughput(point: Point) -> float:
    """Return the throughput by which configurations are compared.

    It is the measured throughput, corrected for the cores that other processes took.
    """
    return (
        point.throughput.value * fmean(map(correction, point.counted))
        if point.rounds
        else point.throughput.value
    )


def summary(trials: Iterable[Trial]) -> Disturbed:
    """Return the summary of all rounds."""
    points = [point.rounds for trial in trials for point in trial.points]
    rounds = [round_ for point in points for round_ in point]
    disturbed = [round_ for round_ in rounds if round_.disturbed]
    if not disturbed:
        return Disturbed(rounds=len(rounds))
    repeated = sum(len(point) - len(counted(point)) for point in points)
    other_cores = median(
        [round_.noise.others for round_ in disturbed if round_.noise is not None] or [0.0]
    )
    verb = "was" if len(disturbed) == 1 else "were"
    cause = (
        f"by other processes (median {other_cores:.1f} cores)"
        if other_cores >= 0.05
        else f"({disturbed[0].disturbed[0]})"
    )
    handling = f"{repeated} {'was' if repeated == 1 else 'were'} repeated"
    if len(disturbed) == len(rounds):
        handling = (
            "so configurations were compared by their throughput for the processor time that"
            " they got"
        )
    elif not repeated:
        handling = "none was repeated, and they are marked"
    says = f"{len(disturbed)} of {len(rounds)} rounds {verb} disturbed {cause}; {handling}"
    return Disturbed(
        rounds=len(rounds),
        disturbed=len(disturbed),
        repeated=repeated,
        others=other_cores,
        says=says,
    )


PROBE_REPEATS = 5
KERNEL_PID = 2  # the parent of all kernel threads
PRESSURES = ("cpu", "memory", "io")


class UsedTime(NamedTuple):
    name: str
    parent: int
    seconds: float  # time on a core, including the time of ended children


class MachineCounters(NamedTuple):
    """Counters at a moment; all of them are seconds except `heat`.

    `processes` is None if processes of other users cannot be read.
    """

    at: float
    family: Mapping[int, UsedTime]
    processes: Mapping[int, UsedTime] | None
    busy: float  # time of all processes on the counted cores
    stolen: float = 0.0
    cores: int = 1
    throttled: float = 0.0
    pressure: Mapping[str, float] = {}
    heat: int = 0
    partial: bool = False  # whether the machine has more cores than the counted ones


def read_counters(
    root: Path = Path("/"), root_pid: int | None = None, cores: Collection[int] = ()
) -> MachineCounters:
    """Read the counters, in a few milliseconds.

    The process `root_pid` and its descendants belong to the benchmark, which may use `cores`.
    """
    root_pid = root_pid or os.getpid()
    stat = _lines(root / "proc/stat")
    if not stat:
        return _by_psutil(root_pid)
    processes = _processes(root / "proc")
    core_lines = [
        line[3:].split() for line in stat if line.startswith("cpu") and line[3:4].isdigit()
    ]
    counted_lines = [core for core in core_lines if int(core[0]) in cores] or core_lines
    ticks = [list(map(int, core[1:])) for core in counted_lines]
    second = os.sysconf("SC_CLK_TCK")
    heat = sum(
        int(_text(file) or 0)
        for file in root.glob(
            "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count"
        )
    )
    return MachineCounters(
        time.monotonic(),
        _family(processes, root_pid),
        processes if 1 in processes else None,
        sum(sum(core[:3]) for core in ticks) / second,
        sum(core[7] for core in ticks if len(core) > 7) / second,
        max(1, len(ticks)),
        _throttled(root),
        {
            name: pressure
            for name in PRESSURES
            if (pressure := _pressure(root / "proc/pressure" / name)) is not None
        },
        heat,
        len(counted_lines) < len(core_lines),
    )


def noise_between(
    before: MachineCounters, after: MachineCounters, probe: float | None = None
) -> Noise:
    """Return the activity of other processes between two readings."""
    elapsed = max(after.at - before.at, 1e-6)
    own_s = max(0.0, _total(after.family) - _total(before.family))
    other_s = max(0.0, after.busy - before.busy - own_s)
    if before.processes is None or after.processes is None:
        others_s, busiest = other_s, ""
    else:
        families = before.family.keys() | after.family.keys()
        earlier_processes, later_processes = (
            {pid: process for pid, process in processes.items() if pid not in families}
            for processes in (before.processes, after.processes)
        )
        others_s = max(0.0, _total(later_processes) - _total(earlier_processes))
        seconds_by_pid = {
            pid: process.seconds
            - (earlier_processes[pid].seconds if pid in earlier_processes else 0.0)
            for pid, process in later_processes.items()
        }
        busiest_pid = max(seconds_by_pid, key=lambda pid: seconds_by_pid[pid], default=None)
        busiest = (
            later_processes[busiest_pid].name
            if busiest_pid is not None and seconds_by_pid[busiest_pid] > 0.01 * elapsed
            else ""
        )
        # It is unknown on which cores those processes ran, so their time may be too high.
        if after.partial:
            others_s, busiest = min(others_s, other_s), ""
    pressure = {
        name: (after.pressure[name] - before.pressure[name]) / elapsed
        for name in after.pressure
        if name in before.pressure
    }
    frequency = None
    with suppress(OSError, NotImplementedError, AttributeError):
        cpu_frequency = psutil.cpu_freq()
        frequency = (
            None if cpu_frequency is None or not cpu_frequency.current else cpu_frequency.current
        )
    return Noise(
        cores=own_s / elapsed,
        others=others_s / elapsed,
        busiest=busiest,
        steal=max(0.0, after.stolen - before.stolen) / elapsed / after.cores,
        throttled=min(1.0, max(0.0, after.throttled - before.throttled) / elapsed),
        cpu_pressure=pressure.get("cpu"),
        memory_pressure=pressure.get("memory"),
        io_pressure=pressure.get("io"),
        heat=max(0, after.heat - before.heat),
        mhz=frequency,
        probe=probe,
    )


class Watch:
    """A context that measures the noise while it is open; `noise` is complete afterwards.

    `fastest` contains the fastest probe of the run, and is shared by all contexts of the run. Other
    processes count on the cores that this process may use, and on `extra_cores`.
    """

    def __init__(self, fastest: list[float], extra_cores: Iterable[int] = ()) -> None:
        self.noise = Noise()
        self._fastest = fastest
        self._cores = {
            *extra_cores,
            *(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()),
        }

    def __enter__(self) -> Watch:
        self._first = probe()
        self._before = read_counters(cores=self._cores)
        return self

    def __exit__(self, *error: object) -> None:
        after, last = read_counters(cores=self._cores), probe()
        self._fastest[:] = [min(*self._fastest, self._first, last)]
        self.noise = noise_between(self._before, after, max(self._first, last) / self._fastest[0])


def probe() -> float:
    """Return the time of a fixed computation, in seconds."""
    times = []
    for _ in range(PROBE_REPEATS):
        started = time.perf_counter()
        sum(number * number for number in range(50_000))
        times.append(time.perf_counter() - started)
    return median(times)


def _processes(proc: Path) -> dict[int, UsedTime]:
    """Return all processes except the kernel's threads.

    A process that ends during the reading is left out; its time is part of its parent's time.
    """
    second, processes = os.sysconf("SC_CLK_TCK"), {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):
            head, _, tail = (entry / "stat").read_text(errors="replace").rpartition(")")
            fields = tail.split()
            pid, parent = int(entry.name), int(fields[1])
            if KERNEL_PID not in (pid, parent):
                processes[pid] = UsedTime(
                    head.partition("(")[2], parent, sum(map(int, fields[11:15])) / second
                )
    return processes


def _family(processes: Mapping[int, UsedTime], root_pid: int) -> dict[int, UsedTime]:
    def belongs(pid: int) -> bool:
        while pid != root_pid and pid in processes:
            pid = processes[pid].parent
        return pid == root_pid

    return {pid: process for pid, process in processes.items() if belongs(pid)}


def _total(processes: Mapping[int, UsedTime]) -> float:
    return sum(process.seconds for process in processes.values())


def _throttled(root: Path) -> float:
    """Return the seconds in which this process's control group waited for its CPU quota.

    Version 1 of control groups counts nanoseconds, version 2 microseconds.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for folder in (
            f"{controllers}{path}",
            f"cpu{path}",
            path.lstrip("/"),
            controllers,
            "cpu",
            "",
        ):
            for line in _lines(root / "sys/fs/cgroup" / folder.lstrip("/") / "cpu.stat"):
                name, _, value = line.partition(" ")
                if name in ("throttled_usec", "throttled_time"):
                    return int(value) / (1e6 if name == "throttled_usec" else 1e9)
    return 0.0


def _pressure(file: Path) -> float | None:
    """Return the seconds in which some task waited, or None if the kernel does not count them."""
    line = next((line for line in _lines(file) if line.startswith("some ")), "")
    return int(line.rpartition("total=")[2]) / 1e6 if "total=" in line else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _lines(file: Path) -> list[str]:
    return _text(file).splitlines()


def _by_psutil(root_pid: int) -> MachineCounters:
    machine_times, family = psutil.cpu_times(), {}
    with suppress(psutil.Error):
        for process in [
            psutil.Process(root_pid),
            *psutil.Process(root_pid).children(recursive=True),
        ]:
            with suppress(psutil.Error):
                process_times = process.cpu_times()
                family[process.pid] = UsedTime("", 0, process_times.user + process_times.system)
    own_times = os.times()  # These include ended children on every system.
    family[0] = UsedTime("", 0, own_times.children_user + own_times.children_system)
    return MachineCounters(
        time.monotonic(),
        family,
        None,
        machine_times.user + machine_times.system + getattr(machine_times, "nice", 0.0),
        cores=os.cpu_count() or 1,
    )


NOISY_VARIATION = 0.05  # The report mentions a larger variation of a fixed computation.


def environment(*, noise: bool = True) -> Environment:
    """Describe this machine; `noise` takes half a second, in which nothing else should run."""
    machine = hardware()
    return Environment(
        fingerprint=machine.fingerprint,
        cpu=machine.cpu,
        cores=machine.cores,
        memory_mib=psutil.virtual_memory().total >> 20,
        gpus=list(machine.gpus),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=_version("torch"),
        tsx=__version__,
        noise=machine_noise() if noise else None,
    )


def quietness_note(environment: Environment) -> str:
    """Return a note if a fixed computation varied much, or an empty text."""
    if (environment.noise or 0.0) <= NOISY_VARIATION:
        return ""
    return (
        f"this machine is not quiet: a fixed computation varies by {environment.noise:.0%}; small"
        " differences mean little"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
