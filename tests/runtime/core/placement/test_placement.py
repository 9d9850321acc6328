"""The GPUs, threads and processes of workers, on made-up machines."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_archiver import parse_model_config
from tsx_runtime.core.models.plan import RegisterOrder, plan
from tsx_runtime.core.placement import hardware, placement
from tsx_runtime.core.placement.cpu_pinning import Cpu, Pinning
from tsx_runtime.core.placement.placement import (
    IDLE_S,
    CoreSharing,
    Machine,
    Parallel,
    WorkerPlacement,
    candidate_gpus,
    gpus_for,
    least_used,
    machine,
    parallel_of,
    placement_of,
    visible_devices,
)
from tsx_runtime.core.workers.launch import launch_of
from tsx_runtime.errors import BadRequest, SettingError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.cores import cpu_count

FOUR = tuple(Cpu(number, number, 0, 0) for number in range(4))


def parse_parallel(yaml: dict[str, object], gpus: int = 0) -> Parallel:
    config, problems = parse_model_config(yaml)
    assert not problems
    return parallel_of(config, gpus)


def spread_workers(allowed_gpus: list[int], need: int, workers: int) -> list[tuple[int, ...]]:
    use_counts: dict[int, int] = {}
    devices = []
    for _ in range(workers):
        devices.append(least_used(allowed_gpus, use_counts, need))
        for number in devices[-1]:
            use_counts[number] = use_counts.get(number, 0) + 1
    return devices


def test_workers_are_assigned_to_gpus_in_turn():
    assert spread_workers([3, 1], 1, 3) == [(3,), (1,), (3,)]
    assert spread_workers([0, 1, 2, 3], 2, 3) == [(0, 1), (2, 3), (0, 1)]


def test_the_least_used_gpu_is_next():
    assert least_used([0, 1, 2], {0: 2, 1: 1, 2: 2}) == (1,)
    assert least_used([], {}) == ()


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 30))
def test_workers_are_spread_evenly_over_gpus(gpus, need, workers):
    need = min(need, gpus)
    assigned_gpus = list(itertools.chain(*spread_workers(list(range(gpus)), need, workers)))
    counts = [assigned_gpus.count(number) for number in range(gpus)]
    assert max(counts) - min(counts) <= 1


def test_a_model_uses_its_device_ids_unless_one_is_absent(caplog):
    assert candidate_gpus([], 3) == [0, 1, 2]
    assert candidate_gpus([2, 0, 2], 3) == [2, 0]
    assert candidate_gpus([2, 3], 3) == [0, 1, 2]
    assert "deviceIds [2, 3]" in caplog.text
    assert candidate_gpus([1], 3, need=2) == [0, 1, 2]
    assert candidate_gpus([1], 0) == []


def test_devices_other_than_cuda_are_used_only_by_name(monkeypatch):
    assert [gpus_for(name, 0) for name in (None, "gpu", "xpu")] == [0, 0, 1]
    assert [gpus_for(name, 4) for name in ("cpu", "cuda")] == [0, 4]
    monkeypatch.setattr(placement, "has_mps", lambda: True)
    assert [gpus_for(name, 0) for name in (None, "gpu", "mps", "cpu")] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("setting", "numbers", "visible"),
    [
        (None, [0, 2], "0,2"),
        ("3,5,7", [0, 2], "3,7"),
        ("GPU-8f,GPU-9e", [1], "GPU-9e"),
        ("MIG-1, MIG-2", [0, 1], "MIG-1,MIG-2"),
    ],
)
def test_visible_devices_keep_the_servers_device_names(setting, numbers, visible):
    assert visible_devices(setting, numbers) == visible


def test_amd_devices_are_counted_by_their_driver(tmp_path):
    for node, simd in enumerate((0, 304, 304)):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd}\n")
    assert hardware._amd_count(tmp_path) == 2


@pytest.mark.parametrize(
    ("yaml", "gpus", "expected"),
    [
        ({}, 0, (1, 1, True, False)),
        ({"parallelType": "tp", "torchrun": {"nproc-per-node": 4}}, 8, (4, 4, True, True)),
        ({"parallelType": "pp", "torchrun": {"nproc-per-node": 2}}, 0, (2, 2, False, True)),
        ({"parallelType": "pptp", "parallelLevel": 4}, 4, (4, 4, True, True)),
        (
            {"parallelType": "tp", "parallelLevel": 4, "torchrun": {"nproc-per-node": 2}},
            4,
            (2, 4, True, True),
        ),
        ({"parallelType": "custom", "parallelLevel": 4}, 4, (1, 4, True, False)),
        ({"parallelType": "tp"}, 4, (1, 1, True, False)),
        ({"torchrun": {"nproc-per-node": "gpu"}}, 3, (3, 3, True, True)),
        ({"torchrun": {"nproc-per-node": "2"}}, 0, (2, 2, True, True)),
        (
            {"torchrun": {"nproc-per-node": 2}, "parallelType": "pp", "asyncCommunication": True},
            0,
            (2, 2, False, True),
        ),
    ],
)
def test_processes_and_gpus_of_a_worker(yaml, gpus, expected):
    shape = parse_parallel(yaml, gpus)
    assert (shape.ranks, shape.gpus, shape.broadcast, shape.is_group) == expected


@pytest.mark.parametrize(
    ("yaml", "gpus", "text"),
    [
        (
            {"parallelType": "tp", "torchrun": {"nproc-per-node": 4}},
            2,
            "takes 4 GPUs, and this server has 2",
        ),
        ({"torchrun": {"nproc-per-node": "gpu"}}, 0, "this server has no GPU"),
        ({"torchrun": {"nproc-per-node": "many"}}, 0, "must be a number, cpu, gpu or auto"),
        (
            {"torchrun": {"nnodes": 2}},
            0,
            "set rdzv-endpoint",
        ),
        (
            {"torchrun": {"nproc-per-node": 2}, "continuousBatching": True},
            0,
            "continuousBatching",
        ),
        (
            {"torchrun": {"nproc-per-node": 2}, "asyncCommunication": True},
            0,
            "asyncCommunication",
        ),
    ],
)
def test_an_invalid_process_group_is_refused(yaml, gpus, text):
    with pytest.raises(BadRequest, match=text):
        parse_parallel(yaml, gpus)


def test_torchrun_keys_become_its_arguments():
    expected = parse_parallel({"torchrun": {"nproc-per-node": 2}}).arguments("m_9000")
    assert expected == (
        "--nnodes=1",
        "--nproc-per-node=2",
        "--node-rank=0",
        "--max-restarts=0",
        "--rdzv-id=m_9000",
    )
    one_machine = {
        "nproc-per-node": 2,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": "0.0.0.0:29500",
        "rdzv-conf": "a=b",
    }
    # Ranks on a single machine have no rendezvous with other machines.
    assert parse_parallel({"torchrun": one_machine}).arguments("m_9000") == expected
    keys = {
        "nnodes": 2,
        "node-rank": 1,
        "rdzv-endpoint": "host:29500",
        "rdzv-conf": "timeout=60",
        "monitor-interval": 5,
        "nproc-per-node": 1,
    }
    of_two_nodes = parse_parallel({"torchrun": keys}).arguments("m_9000")
    assert {
        "--nnodes=2",
        "--node-rank=1",
        "--monitor-interval=5",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=host:29500",
    } < set(of_two_nodes)
    assert "--rdzv-conf=timeout=60" in of_two_nodes


def place_worker(
    current_machine: Machine,
    worker: int = 0,
    workers: int = 1,
    gpus: tuple[int, ...] = (),
    **values: Any,
) -> WorkerPlacement:
    """Place a worker of a model whose parallel configuration is `values["parallel"]`."""
    shape = parse_parallel(values.pop("parallel", {}), 4)
    threads = values.pop("threads", None)
    return placement_of(
        current_machine, shape, threads=threads, worker=worker, workers=workers, gpus=gpus, **values
    )


def test_a_gpu_worker_gets_its_device_and_a_group_sees_only_its_own():
    current_machine = Machine(8, cuda_visible_devices="4,5,6,7")
    single_gpu = place_worker(current_machine, 0, 2, (2,))
    assert (single_gpu.gpu_id, single_gpu.variables, single_gpu.threads) == (2, {}, 4)
    group = place_worker(
        current_machine, 1, 2, (2, 3), parallel={"torchrun": {"nproc-per-node": 2}}
    )
    assert (group.gpu_id, group.variables, group.threads) == (0, {"CUDA_VISIBLE_DEVICES": "6,7"}, 2)
    custom = {"parallelType": "custom", "parallelLevel": 2}
    custom_group = place_worker(current_machine, gpus=(0, 1), parallel=custom, threads=3)
    visible = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert (custom_group.gpu_id, custom_group.variables, custom_group.threads) == (0, visible, 3)


def test_a_pinned_worker_has_one_thread_per_core_unless_configured():
    current_machine = Machine(4, None, FOUR, Pinning())
    assert place_worker(current_machine, 1, 2)[:2] == ((2, 3), 2)
    assert place_worker(current_machine, 1, 2, threads=1)[:2] == ((2, 3), 1)
    assert place_worker(current_machine, gpus=(0,)).cores == ()
    openmp = {"torchrun": {"nproc-per-node": 2, "OMP_NUMBER_THREADS": 3}}
    assert place_worker(current_machine, parallel=openmp)[:2] == ((0, 1, 2, 3), 3)


def test_workers_share_the_cores_unless_omp_num_threads_is_set():
    # A model that is being removed counts no workers, so its last one gets all cores.
    assert place_worker(Machine(4), workers=0, sharing=0).threads == 4
    assert place_worker(Machine(4), sharing=2)[1::3] == (2, True)
    assert place_worker(machine(False, "", {"OMP_NUM_THREADS": "3,2"}))[1::3] == (3, False)


def test_invalid_launcher_arguments_prevent_the_start():
    with pytest.raises(SettingError, match=r"cpu_launcher_args .* core 4096"):
        machine(True, "--core-list 4096", {})
    assert machine(False, "--core-list 4096", {}).pinning is None


def test_launcher_arguments_are_ignored_if_pinning_is_unsupported(monkeypatch, caplog):
    monkeypatch.setattr("tsx_runtime.core.placement.placement.read_cpus", list)
    current_machine = machine(True, "--core-list 0,1", {})
    assert place_worker(current_machine).cores == ()
    assert "so no worker is pinned" in caplog.text


def test_only_process_groups_start_as_programs():
    assert launch_of(Parallel(gpus=4), None, threads=1, group_name="m_1") is None
    group = launch_of(
        parse_parallel({"torchrun": {"nproc-per-node": 2}}), None, threads=3, group_name="m_1"
    )
    assert group is not None
    assert (group.ranks, group.variables, group.packages) == (2, {"OMP_NUM_THREADS": "3"}, None)


def test_a_multi_gpu_model_starts_as_many_workers_as_fit():
    config, _ = parse_model_config({"parallelType": "tp", "torchrun": {"nproc-per-node": 2}})
    assert (
        plan(RegisterOrder(url="m", loaded_at_startup=True), config, Settings(), 5).min_workers == 2
    )


def test_a_configured_core_count_overrides_the_machines():
    assert machine(False, "", {}, 3).cores == 3
    assert machine(False, "", {}).cores == cpu_count()


class Worker:
    def __init__(self, *, threads: int = 8, shares_cores: bool = True) -> None:
        self.answered, self.batches = 0, 0
        self.threads, self.shares_cores = threads, shares_cores

    def set_threads(self, threads: int) -> None:
        self.threads = threads


def test_busy_workers_share_the_cores_left_by_configured_ones() -> None:
    now = 0.0
    first, second, idle, configured = (
        Worker(),
        Worker(),
        Worker(),
        Worker(threads=3, shares_cores=False),
    )
    workers = [first, second, idle, configured]
    sharing = CoreSharing(8, lambda: workers, lambda: now)

    def threads_after(seconds: float, *at_work: Worker) -> list[int]:
        nonlocal now
        now += seconds
        for worker in at_work:
            worker.answered += 1
        sharing.share()
        return [worker.threads for worker in workers]

    assert threads_after(1) == [8, 8, 8, 3]
    assert threads_after(1, first) == [8, 8, 8, 3]
    assert threads_after(1, first, second) == [4, 4, 8, 3]
    assert threads_after(1, first, second, configured) == [2, 2, 8, 3]
    # The second worker is busy with one long request.
    second.batches = 1
    assert threads_after(IDLE_S + 2, first) == [4, 4, 8, 3]
    second.batches = 0
    assert threads_after(IDLE_S + 2, first) == [8, 4, 8, 3]
    workers.remove(first)
    assert threads_after(1, second) == [8, 8, 3]


def test_each_worker_has_at_least_one_core() -> None:
    workers = [Worker(), Worker(), Worker(), Worker(threads=4, shares_cores=False)]
    for worker in workers:
        worker.batches = 1
    CoreSharing(2, lambda: workers).share()
    assert [worker.threads for worker in workers] == [1, 1, 1, 4]
