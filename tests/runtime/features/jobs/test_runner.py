"""The job runner: how many jobs it runs, what a refusal means, and what it leaves at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.kit.stored_jobs import ANSWER, QUEUE_LIMIT, a_new_job
from tsx_runtime.errors import QueueFull, StoreFull
from tsx_runtime.features.jobs import runner as runner_module
from tsx_runtime.features.jobs.runner import Runner
from tsx_runtime.features.jobs.service import postgres_store
from tsx_runtime.features.jobs.storage.sql_store import SqlStore
from tsx_runtime.features.jobs.storage.sqlite import SqliteStore
from tsx_runtime.features.jobs.storage.store import (
    JOB,
    AnswerKey,
    JobRecord,
    JobTarget,
    StoredAnswer,
)

pytestmark = pytest.mark.anyio


class Model:
    """A model that answers when the test allows it."""

    def __init__(self, places: int | None = 2) -> None:
        self.space = places
        self.running_jobs: list[str] = []
        self.max_running = 0
        self.withdrawn: list[str] = []
        self.refusals: list[QueueFull] = []
        self.may_answer = asyncio.Event()

    def capacity(self, target: JobTarget) -> int | None:
        return self.space

    async def answer(self, job: JobRecord) -> StoredAnswer:
        if self.refusals:
            raise self.refusals.pop()
        self.running_jobs.append(job.id)
        self.max_running = max(self.max_running, len(self.running_jobs))
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.withdrawn.append(job.id)
            raise
        finally:
            self.running_jobs.remove(job.id)
        return ANSWER


class Work:
    """A runner with its store and model."""

    def __init__(self, job_store: SqlStore, model: Model, owner: str, keep_s: float) -> None:
        self.store, self.model = job_store, model
        self._answered = asyncio.Semaphore(0)
        self.runner = Runner(job_store, model, owner, keep_s, lambda job: self._answered.release())

    async def add(self, *ids: str) -> None:
        for id in ids:
            await self.store.add(a_new_job(id), QUEUE_LIMIT)
        self.runner.notify_queued(("m", ""))

    async def answers(self, count: int = 1) -> None:
        """Wait for `count` more answers."""
        for _ in range(count):
            await asyncio.wait_for(self._answered.acquire(), 30)

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(30):
            while not condition():
                # This waits for one turn of the store's thread.
                await self.store.counts()


@asynccontextmanager
async def running_work(
    job_store: SqlStore, model: Model, owner: str = "me", keep_s: float = 60
) -> AsyncIterator[Work]:
    work = Work(job_store, model, owner, keep_s)
    task = asyncio.create_task(work.runner.run())
    try:
        yield work
    finally:
        task.cancel()
        await work.runner.close()
        await job_store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.sqlite"


async def test_a_model_gets_no_more_jobs_than_it_has_places(path: Path) -> None:
    async with running_work(SqliteStore(path), Model()) as work:
        await work.add(*"abcde")
        await work.until(lambda: len(work.model.running_jobs) == 2)
        work.model.may_answer.set()
        await work.answers(5)
        assert work.model.max_running == 2
        assert await work.store.counts() == {("m", "done"): 5}


async def test_a_temporarily_refused_job_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MIN_PAUSE_S", 0.001)
    async with running_work(SqliteStore(path), Model()) as work:
        work.model.refusals = [QueueFull("full", retry_after=0) for _ in range(3)]
        work.model.may_answer.set()
        await work.add("a")
        await work.answers()
        assert work.model.refusals == []


async def test_jobs_stay_queued_while_their_model_has_no_workers(path: Path) -> None:
    async with running_work(SqliteStore(path), Model(0)) as work:
        work.model.may_answer.set()
        await work.add("a")
        await work.runner.poll()
        assert await work.store.counts() == {("m", "queued"): 1}
        work.model.space = 1
        work.runner.notify_change()
        await work.answers()


async def test_jobs_of_an_unregistered_model_wait_for_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_work(SqliteStore(path), Model(None)) as work:
        work.model.may_answer.set()
        await work.add("a")
        await work.runner.tend()
        assert await work.store.counts() == {("m", "queued"): 1}
        monkeypatch.setattr(runner_module, "LOADING_GRACE_S", -1)
        await work.runner.tend()
        await work.answers()


async def test_jobs_that_run_at_the_stop_are_left_to_the_next_server(path: Path) -> None:
    async with running_work(SqliteStore(path), Model()) as work:
        await work.add("a", "b", "c")
        await work.until(lambda: len(work.model.running_jobs) == 2)
        await work.runner.stop(0.01, asyncio.Event())
    assert sorted(work.model.withdrawn) == ["a", "b"]
    async with running_work(SqliteStore(path), Model()) as next_work:
        next_work.model.may_answer.set()
        await next_work.runner.tend()
        await next_work.answers(3)


async def test_a_stop_waits_for_running_jobs_and_starts_no_others(path: Path) -> None:
    async with running_work(SqliteStore(path), Model(1)) as work:
        await work.add("a", "b")
        await work.until(lambda: work.model.running_jobs == ["a"])
        stop_task = asyncio.create_task(work.runner.stop(30, asyncio.Event()))
        await asyncio.sleep(0)
        work.model.may_answer.set()
        await stop_task
        assert await work.store.counts() == {("m", "done"): 1, ("m", "queued"): 1}


async def test_jobs_cancelled_before_their_start_free_their_places(path: Path) -> None:
    async with running_work(SqliteStore(path), Model(1)) as work:
        claim, cancelled = work.store.claim, []

        async def claim_and_cancel(*arguments: Any) -> list[JobRecord]:
            cancelled.extend(jobs := await claim(*arguments))
            for job in jobs:
                asyncio.get_running_loop().call_soon(work.runner.cancel, job.id)
            return jobs

        work.store.claim = claim_and_cancel  # type: ignore[method-assign]
        await work.add("a")
        await work.until(lambda: bool(cancelled) and not work.runner._claims)
        work.store.claim = claim  # type: ignore[method-assign]
        await work.add("b")
        await work.until(lambda: work.model.running_jobs == ["b"])


async def test_a_job_retried_after_its_cancellation_belongs_to_its_new_claim(path: Path) -> None:
    async with running_work(SqliteStore(path), Model(2)) as work:
        await work.add("a")
        await work.until(lambda: work.model.running_jobs == ["a"])
        await work.store.cancel("a", 60)
        await work.store.retry("a")
        work.runner.notify_queued(("m", ""))
        await work.until(lambda: len(work.runner._claims) == 2)
        await work.runner.tend()
        await work.until(lambda: list(work.runner._claims) == [("a", 2)])
        assert work.model.running_jobs == ["a"]


async def test_no_job_starts_while_answers_cannot_be_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_UNSTORED", 3)
    monkeypatch.setattr(runner_module, "MIN_PAUSE_S", 0.001)
    async with running_work(SqliteStore(path), Model(1)) as work:
        finish, refusals = work.store.finish, []

        async def refuse(*_: Any) -> bool:
            refusals.append(StoreFull("full"))
            raise refusals[-1]

        work.store.finish = refuse  # type: ignore[method-assign]
        work.model.may_answer.set()
        await work.add(*"abcdefgh")
        await work.until(lambda: len(refusals) > 20)
        assert (await work.store.counts())["m", "running"] == 3
        work.store.finish = finish  # type: ignore[method-assign]
        await work.answers(8)


async def test_waiting_for_a_job_ends_at_its_cancellation_or_the_stop(path: Path) -> None:
    async with running_work(SqliteStore(path), Model(0)) as work:
        await work.add("a", "b")
        cancelled, stop_waiter = (asyncio.create_task(work.runner.wait(id, 600)) for id in "ab")
        await asyncio.sleep(0)
        work.runner.cancel("a")
        await asyncio.wait_for(cancelled, 30)
        await work.runner.stop(0.01, asyncio.Event())
        await asyncio.wait_for(stop_waiter, 30)


async def test_the_longer_of_two_waiting_clients_is_notified(path: Path) -> None:
    async with running_work(SqliteStore(path), Model(0)) as work:
        await work.add("a")
        longer = asyncio.create_task(work.runner.wait("a", 600))
        await work.runner.wait("a", 0.01)
        work.runner.cancel("a")
        await asyncio.wait_for(longer, 30)


async def test_a_job_is_left_to_a_server_that_has_its_model(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteStore, "shared", True)
    async with running_work(SqliteStore(path), Model(None), keep_s=0) as work:
        work.model.may_answer.set()
        await work.add("a", "b")
        (claimed_job,) = await work.store.claim({("m", ""): 1}, "another", 60)
        for _ in range(3):
            await work.runner.tend()
        assert await work.store.counts() == {("m", "running"): 1, ("m", "queued"): 1}
        await work.store.finish(claimed_job.id, 1, "another", ANSWER, 60)
        # No server has taken the job for as long as answers are kept.
        for _ in range(2):
            await work.runner.tend()
        await work.answers()


@pytest.mark.slow
async def test_a_dead_servers_jobs_are_taken_over_and_lost_ones_dropped(database: str) -> None:
    dead_store = postgres_store(database)
    await dead_store.add(a_new_job("a"), QUEUE_LIMIT)
    assert len(await dead_store.claim({("m", ""): 1}, "dead", -1)) == 1
    async with running_work(postgres_store(database), Model(), "alive") as work:
        await work.runner.tend()
        await work.until(lambda: work.model.running_jobs == ["a"])
        await dead_store.cancel("a", 60)
        await work.runner.tend()
        await work.until(lambda: work.model.withdrawn == ["a"])
        assert await work.store.get_answer(AnswerKey(JOB, "", "a")) is None
    await dead_store.close()
