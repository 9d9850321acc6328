"""The noise of the machine, read from files like those in /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tsx_cli.bench.search import machine as noise
from tsx_cli.bench.search.machine import Watch, noise_between, probe, read_counters

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
OWN_PID = 10


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/pressure").mkdir(parents=True)
    return tmp_path


def process(
    root: Path, pid: int, seconds: float, parent: int = 1, name: str = "sh", waited: float = 0.0
) -> None:
    directory = root / "proc" / str(pid)
    directory.mkdir(exist_ok=True)
    fields = [
        "S",
        str(parent),
        *["0"] * 9,
        str(round(seconds * TICKS)),
        "0",
        str(round(waited * TICKS)),
        "0",
        "20",
    ]
    (directory / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def stat(root: Path, user: float, stolen: float = 0.0) -> None:
    """Return a /proc/stat of two cores, in equal parts."""
    core = f"{round(user / 2 * TICKS)} 0 0 1000 0 0 0 {round(stolen / 2 * TICKS)} 0 0"
    (root / "proc/stat").write_text(f"cpu  9 9 9 9\ncpu0 {core}\ncpu1 {core}\nintr 5\n")


def counters_at(root: Path, at: float) -> noise.MachineCounters:
    return read_counters(root, OWN_PID)._replace(at=at)


def test_other_processes_exclude_the_benchmark_and_the_kernel(root: Path) -> None:
    stat(root, 100)
    for pid, parent in ((1, 0), (2, 0), (OWN_PID, 1), (11, OWN_PID), (12, 11), (20, 1), (30, 2)):
        process(root, pid, 5, parent)
    first_reading = counters_at(root, 100)
    # Process 12 is a worker of the server.
    process(root, 12, 9, 11)
    process(root, 20, 7, 1, "a (strange) name")
    # Process 30 belongs to the kernel.
    process(root, 30, 9, 2)
    # Process 21 started after the first reading.
    process(root, 21, 1, 20)
    figures = noise_between(first_reading, counters_at(root, 102))
    assert (figures.cores, figures.others, figures.busiest) == (2.0, 1.5, "a (strange) name")


def test_the_time_of_an_ended_process_counts_for_its_parent(root: Path) -> None:
    stat(root, 100)
    for pid, parent in ((1, 0), (OWN_PID, 1), (11, OWN_PID), (20, 1), (21, 20)):
        process(root, pid, 5, parent)
    first_reading = counters_at(root, 0)
    for pid in (11, 21):
        (root / "proc" / str(pid) / "stat").unlink()
    # The generator used one second more.
    process(root, OWN_PID, 5, 1, waited=6)
    process(root, 20, 5, 1, waited=7)
    figures = noise_between(first_reading, counters_at(root, 2))
    assert (figures.cores, figures.others) == (0.5, 1.0)


def test_hidden_processes_are_derived_from_the_load_of_the_cores(root: Path) -> None:
    stat(root, 100)
    process(root, OWN_PID, 5)
    first_reading = counters_at(root, 0)
    stat(root, 103)
    process(root, OWN_PID, 6)
    figures = noise_between(first_reading, counters_at(root, 2))
    assert (figures.cores, figures.others, figures.busiest) == (0.5, 1.0, "")


def test_only_the_load_on_the_used_cores_counts(root: Path) -> None:
    stat(root, 100)
    for pid, parent in ((1, 0), (OWN_PID, 1), (20, 1)):
        process(root, pid, 5, parent)
    first_reading = read_counters(root, OWN_PID, {0})._replace(at=0)
    stat(root, 104)
    process(root, OWN_PID, 6.5)
    # Most of the load runs on the other core.
    process(root, 20, 8)
    figures = noise_between(first_reading, read_counters(root, OWN_PID, {0})._replace(at=2))
    assert (figures.cores, figures.others, figures.busiest) == (0.75, 0.25, "")


def test_steal_is_a_fraction_of_all_cores(root: Path) -> None:
    stat(root, 100, 3)
    process(root, 1, 0, 0)
    first_reading = counters_at(root, 0)
    stat(root, 100, 4)
    assert noise_between(first_reading, counters_at(root, 5)).steal == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("group", "file", "name", "unit"),
    [
        ("0::/system.slice/a", "system.slice/a/cpu.stat", "throttled_usec", 1e6),
        ("0::/not/here", "cpu.stat", "throttled_usec", 1e6),
        ("4:memory:/m\n3:cpu,cpuacct:/a", "cpu,cpuacct/a/cpu.stat", "throttled_time", 1e9),
        ("4:memory:/m\n3:cpu:/from/the/host", "cpu/cpu.stat", "throttled_time", 1e9),
    ],
)
def test_an_exhausted_quota_is_read_from_both_cgroup_versions(
    root: Path, group: str, file: str, name: str, unit: float
) -> None:
    stat(root, 100)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text(f"{group}\n")
    path = root / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text(f"nr_periods 7\nnr_throttled 1\n{name} {round(2 * unit)}\n")
    first_reading = counters_at(root, 0)
    path.write_text(f"nr_periods 9\nnr_throttled 2\n{name} {round(3 * unit)}\n")
    assert noise_between(first_reading, counters_at(root, 4)).throttled == pytest.approx(0.25)


def test_pressure_and_throttling_count_from_the_start_and_may_be_unknown(root: Path) -> None:
    stat(root, 100)
    pressure_file = root / "proc/pressure/memory"
    pressure_file.write_text(
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    heat = root / "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
    heat.parent.mkdir(parents=True)
    heat.write_text("3\n")
    first_reading = counters_at(root, 0)
    pressure_file.write_text("some avg10=9.00 avg60=0.00 avg300=0.00 total=1500000\n")
    heat.write_text("5\n")
    figures = noise_between(first_reading, counters_at(root, 5))
    assert (figures.memory_pressure, figures.io_pressure, figures.cpu_pressure, figures.heat) == (
        0.1,
        None,
        None,
        2,
    )


def test_without_proc_psutil_reads_processes_and_cores(tmp_path: Path) -> None:
    first_reading = read_counters(tmp_path)
    probe()
    after = read_counters(tmp_path)
    assert first_reading.processes is None
    assert os.getpid() in first_reading.family
    assert noise_between(first_reading, after).others >= 0


def test_probes_are_compared_with_the_fastest_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([2.0, 3.0, 1.0, 1.0, 1.5, 2.0])
    monkeypatch.setattr(noise, "probe", lambda: next(times))
    fastest: list[float] = []
    noises = []
    for _ in range(3):
        with Watch(fastest) as watch:
            pass
        noises.append(watch.noise.probe)
    assert noises == [1.5, 1.0, 2.0]
