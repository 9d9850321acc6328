"""The cores that workers are pinned to, on a made-up machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.placement.cpu_pinning import (
    Cpu,
    Pinning,
    check_pinning,
    choose_cores,
    parse_cores,
    parse_pinning,
    read_cpus,
)

# Two packages of four cores with two threads each; Linux numbers the first threads first.
SERVER = [Cpu(number, number % 8 % 4, number % 8 // 4, number % 8 // 4) for number in range(16)]


def share_cores(arguments: str, workers: int) -> list[tuple[int, ...]]:
    return [
        choose_cores(parse_pinning(arguments), SERVER, worker, workers) for worker in range(workers)
    ]


@pytest.mark.parametrize(
    ("arguments", "workers", "expected"),
    [
        ("", 1, [(0, 1, 2, 3, 4, 5, 6, 7)]),  # physical cores only
        ("", 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("--use-logical-core", 2, [(0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15)]),
        ("--ncores-per-instance 3", 2, [(0, 1, 2), (3, 4, 5)]),
        ("--ncores_per_instance 3 --skip_cross_node_cores", 2, [(0, 1, 2), (4, 5, 6)]),
        ("--node-id 1", 2, [(4, 5), (6, 7)]),
        ("--node_id=1 --ncores_per_instance=4", 1, [(4, 5, 6, 7)]),
        ("--core-list 6,2,4-5 --ncores_per_instance 2", 2, [(6, 2), (4, 5)]),
        ("--latency-mode", 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("--throughput-mode", 3, [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3)]),
        ("--ninstances 4", 2, [(0, 1), (2, 3)]),
        # Workers beyond the free cores share cores.
        (
            "--ncores_per_instance 4",
            3,
            [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3)],
        ),
        ("--ncores_per_instance 99", 1, [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("--disable-numactl --disable-taskset", 1, [()]),
    ],
)
def test_cores_are_assigned_as_torchs_launcher_does(arguments, workers, expected):
    assert share_cores(arguments, workers) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--ncores_per_instnce 2", "unrecognized arguments"),
        ("--ncores_per_instance two", "invalid int value"),
        ("--ncores_per_instance 0", "must be 1 or more"),
        ("--core-list 0-x", "' is neither a core nor a range of cores such as 0-3"),
        ("--latency-mode --throughput-mode", "cannot be combined"),
        ("'", "quotation"),
    ],
)
def test_invalid_options_are_errors(arguments, text):
    with pytest.raises(ValueError, match=text):
        parse_pinning(arguments)


def test_absent_cores_and_nodes_are_errors():
    with pytest.raises(ValueError, match="core 16 is not available"):
        check_pinning(Pinning(core_list=(3, 16)), SERVER)
    with pytest.raises(ValueError, match=r"no NUMA node 2; .* 0, 1"):
        check_pinning(Pinning(node=2), SERVER)
    check_pinning(Pinning(core_list=(15,), node=1), SERVER)


def test_options_about_preloaded_libraries_are_ignored_and_reported():
    assert parse_pinning("--enable_tcmalloc --disable-iomp --log-path /tmp").ignored_options == (
        "--enable-tcmalloc",
        "--disable-iomp",
        "--log-path",
    )


def test_core_lists_are_parsed_in_linux_format():
    assert parse_cores("0-2,5, 7\n") == (0, 1, 2, 5, 7)


@given(st.integers(1, 20), st.integers(1, 16), st.booleans(), st.booleans())
def test_workers_share_no_core_and_have_equally_many(workers, size, logical, skip):
    pinning = Pinning(cores_per_instance=size, use_logical_cores=logical, skip_cross_node=skip)
    core_sets = [choose_cores(pinning, SERVER, worker, workers) for worker in range(workers)]
    distinct_sets = 1 + max(
        index for index in range(workers) if core_sets[index] not in core_sets[:index]
    )
    assigned_cores = [core for cores in core_sets[:distinct_sets] for core in cores]
    assert len(assigned_cores) == len(set(assigned_cores))
    assert len({len(cores) for cores in core_sets}) == 1
    assert all(core_sets)


def test_the_cores_of_this_machine_are_read():
    import os

    assert [cpu.number for cpu in read_cpus()] == sorted(os.sched_getaffinity(0))
