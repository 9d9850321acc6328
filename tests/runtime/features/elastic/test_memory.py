"""The memory budget of all models: which models it unloads, and real workers under a budget."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.jobs import TIMEOUT, answer_of
from tests.support.clients.talker import (
    a_registry,
    a_talker,
    ask,
    register,
    submit,
    until,
)
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.errors import LoadOutOfMemory
from tsx_runtime.features.elastic import memory
from tsx_runtime.features.elastic.memory import MEGA, MemoryBudget, least_recently_used

pytestmark = pytest.mark.anyio


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), max_size=20), st.integers(-10, 300)
)
def test_only_the_least_recently_used_models_are_unloaded(models, excess):
    idle = [(used, memory, number) for number, (used, memory) in enumerate(models)]
    unloaded = least_recently_used(idle, excess)
    if unloaded is None:
        assert sum(memory for _, memory in models) < excess
        return
    freed_bytes = [models[number][1] for number in unloaded]
    assert sum(freed_bytes) >= excess
    assert not freed_bytes or sum(freed_bytes[:-1]) < excess
    remaining_use_times = [
        used for number, (used, _) in enumerate(models) if number not in unloaded
    ]
    assert all(models[number][0] <= used for number in unloaded for used in remaining_use_times)


class IdleModel:
    """A model as the budget sees it; it is idle as soon as it has loaded."""

    label = "m"
    archive = SimpleNamespace(directory="")

    def __init__(self) -> None:
        self.workers: list = []
        self.last_used = 0

    @property
    def is_idle(self) -> bool:
        return all(worker.state is WorkerState.READY for worker in self.workers)

    def adapt(self, count: int, reason: str, numbers: str) -> Coroutine[Any, Any, None]:
        self.workers = []
        return asyncio.sleep(0)


@pytest.fixture
def set_sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the size of model files and the memory of workers."""

    def set_sizes(files: int, worker: Any = None) -> None:
        monkeypatch.setattr(memory, "size_of_files", lambda directory: files)
        if worker is not None:
            memory_of = worker if callable(worker) else lambda workers: worker
            monkeypatch.setattr(memory, "memory_of", memory_of)

    return set_sizes


@pytest.mark.parametrize("size", [0, 10])
async def test_200_concurrent_loads_succeed_and_the_newest_20_models_stay(size, set_sizes):
    set_sizes(size, 10)
    models = [IdleModel() for _ in range(200)]
    ready_numbers = itertools.count(1)
    budget = MemoryBudget(200, lambda: models, lambda: models)

    async def load(model, turn_count):
        worker = Worker("1", (), 0.0)
        model.workers = [worker]
        async with budget.reserve(model, worker):
            for _ in range(turn_count):
                await asyncio.sleep(0)
        worker.state, model.last_used = WorkerState.READY, next(ready_numbers)
        assert sum(model.is_idle for model in models if model.workers) <= 20

    loads = [load(model, number * 7 % 5) for number, model in enumerate(models)]
    await asyncio.wait_for(asyncio.gather(*loads), TIMEOUT)
    assert budget.free() == 0
    newest_models = sorted(models, key=lambda model: model.last_used)[-20:]
    assert {model for model in models if model.workers} == set(newest_models)


class GpuModel(IdleModel):
    """A model whose workers hold memory on one GPU."""

    def __init__(self, gpu: int, size: int, used: int = 0) -> None:
        super().__init__()
        self.gpu = gpu
        self.size = size
        self.plan = SimpleNamespace(gpus=(gpu,))
        self.last_used = used

    def start(self, pid: int) -> Worker:
        worker = Worker("1", (self.gpu,), 0.0)
        worker.instance = SimpleNamespace(
            process=SimpleNamespace(members=lambda: [SimpleNamespace(pid=pid)])
        )  # type: ignore[assignment]  # all that is measured
        self.workers = [worker]
        return worker


def a_gpu_budget(
    models: list[GpuModel], gpu_bytes: int, *, host: int | None = None, is_known: bool = True
) -> MemoryBudget:
    """Make a budget; the driver uses a model's position in the list as its process id."""

    async def read() -> dict[int, dict[int, int]]:
        return {
            gpu: {
                pid: model.size for pid, model in enumerate(models) if model.gpu == gpu and is_known
            }
            for gpu in (0, 1)
        }

    return MemoryBudget(host, lambda: models, lambda: models, gpu_bytes, 2, read)


async def load_gpu(budget: MemoryBudget, models: list[GpuModel], number: int) -> None:
    worker = models[number].start(number)
    async with budget.reserve(models[number], worker):  # type: ignore[arg-type]  # as a model
        await asyncio.sleep(0)
    worker.state = WorkerState.READY


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_gpu_has_its_own_budget_and_other_models_stay(is_known, set_sizes):
    set_sizes(60)
    models = [GpuModel(gpu, 60, used) for used, gpu in enumerate([1, 0, 0, 0])]

    budget = a_gpu_budget(models, 130, is_known=is_known)
    for number in range(4):
        await load_gpu(budget, models, number)
    assert [bool(model.workers) for model in models] == [True, False, True, True]
    assert [budget.room_for_workers(model) for model in models] == [1, 0, 0, 0]  # type: ignore[arg-type]
    assert budget.free() is None
    for model in models[2:]:
        model.workers[0].state = WorkerState.LOADING
    with pytest.raises(LoadOutOfMemory, match="model_gpu_memory is 0 MB"):
        await load_gpu(budget, models, 1)
    assert budget.room_for_workers(models[0]) == 1  # type: ignore[arg-type]


async def test_a_growing_model_causes_unloads_on_its_gpu(set_sizes):
    set_sizes(10)
    models = [GpuModel(gpu, 40, used) for used, gpu in enumerate([0, 0, 1])]

    budget = a_gpu_budget(models, 100)
    for number in range(3):
        await load_gpu(budget, models, number)
    models[1].size = 70
    await budget.measure()
    assert [bool(model.workers) for model in models] == [False, True, True]


async def test_a_load_is_not_blocked_by_another_that_waits_for_the_gpu(set_sizes):
    used_memory = [10]
    set_sizes(40, lambda workers: used_memory[0])
    models = [GpuModel(0, 10), GpuModel(0, 50), GpuModel(0, 10)]

    budget = a_gpu_budget(models, 85, host=100)
    await load_gpu(budget, models, 0)
    used_memory[0] = 75
    models[0].workers[0].state = WorkerState.LOADING
    results = await asyncio.wait_for(
        asyncio.gather(
            load_gpu(budget, models, 1), load_gpu(budget, models, 2), return_exceptions=True
        ),
        TIMEOUT,
    )
    assert [type(result) for result in results] == [LoadOutOfMemory, type(None)]


async def test_200_concurrent_loads_on_two_gpus_keep_all_three_budgets(set_sizes):
    set_sizes(0, 10)
    models = [GpuModel(number % 2, 10) for number in range(200)]
    ready_numbers = itertools.count(1)

    async def load(budget, number):
        await load_gpu(budget, models, number)
        models[number].last_used = next(ready_numbers)
        loaded_models = [model for model in models if model.workers and model.is_idle]
        assert len(loaded_models) <= 25
        assert max(sum(model.gpu == gpu for model in loaded_models) for gpu in (0, 1)) <= 15

    budget = a_gpu_budget(models, 150, host=250)
    await asyncio.wait_for(
        asyncio.gather(*(load(budget, number) for number in range(200))), TIMEOUT
    )
    assert budget.free() == 0


@pytest.mark.usefixtures("processes")
async def test_models_are_unloaded_for_others_and_reloaded_on_request(tmp_path, set_sizes):
    """Use made-up sizes, since the measured sizes of processes that share memory vary."""
    set_sizes(0, lambda workers: 100 * MEGA * len(list(workers)))
    names = ["a", "b", "c", "d", "e", "f"]

    async with a_registry(model_memory=250 * MEGA) as registry:

        def loaded_names() -> str:
            return "".join(name for name in names if registry.find(name).workers)

        for name in names:
            await register(registry, tmp_path / name, name=name)
        assert len(loaded_names()) == 2
        for name in names:
            assert await ask(registry.find(name), name) == name
            assert len(loaded_names()) <= 2
        assert loaded_names() == "ef"
        await ask(registry.find("e"), "again")
        await ask(registry.find("a"), "x")
        assert loaded_names() == "ae"
        assert registry.find("f").asleep
        assert registry.find("f").ready
        assert "model_memory" in registry.find("f").last_scaling
        gate = tmp_path / "go"
        busy_jobs = [submit(registry.find(name), f"until {gate}") for name in "ae"]
        waiting_job = submit(registry.find("b"), "b")
        await until(lambda: registry.find("b").last_error)
        assert "There is no room" in registry.find("b").last_error
        with pytest.raises(LoadOutOfMemory, match="model_memory is 250 MB"):
            await register(registry, tmp_path / "g", name="g")
        gate.touch()
        for job in (*busy_jobs, waiting_job):
            await answer_of(job)
        assert len(loaded_names()) <= 2


async def test_a_successor_process_does_not_double_the_models_memory(set_sizes):
    set_sizes(0, lambda workers: sum(10 + 10 * bool(worker.successor) for worker in workers))
    model, second = IdleModel(), IdleModel()

    async def load(budget, version, successor=None):
        (worker,) = version.workers = version.workers or [Worker("1", (), 0.0)]
        worker.successor = successor
        async with budget.reserve(version, worker):
            pass
        worker.state, worker.successor = WorkerState.READY, None

    budget = MemoryBudget(25, lambda: [], lambda: [model, second])
    await load(budget, model)
    await load(budget, model, successor="a process that has loaded beside it")
    model.workers = []
    await load(budget, second)
    await load(budget, model)


async def test_a_model_with_job_tickets_is_not_unloaded_for_others(registry, tmp_path):
    version = await a_talker(registry, tmp_path, config="useJobTicket: true\n")
    assert not version.is_idle
