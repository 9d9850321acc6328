"""Runs stored requests: claims jobs for the models of this server, a bounded number at a time, and stores their answers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.errors import StoreFull, StoreUnavailable, TsxError, Unavailable
from tsx_runtime.jobs.job_stats import JobStats
from tsx_runtime.jobs.store import JobRecord, JobStore, JobTarget, StoredAnswer

LEASE = 30.0  # seconds after which another server takes a job whose server does not renew its lease
GRACE = 60.0  # seconds that a job waits for a model which is not registered here: it may be loading, or another server may have it
ORPHANS = 32  # jobs of one unknown model that are answered at a time
PAUSE = 0.5  # seconds before the next try where a store or a model refuses; it doubles
LONGEST_PAUSE = 30.0
MEMORY = 0.9  # the weight of earlier jobs in the mean time of one
STORE_ERRORS = (StoreFull, StoreUnavailable)
ResultT = TypeVar("ResultT")

logger = logging.getLogger("tsx.jobs")


class JobExecutor(Protocol):
    """Submits a stored request to its model."""

    def places(self, target: JobTarget) -> int | None:
        """How many jobs may be at the model at once, 0 while it has no workers; None where it is not registered."""

    async def answer(self, job: JobRecord) -> StoredAnswer:
        """The model's answer, or that of an error; cancelled, it withdraws the request. Raises Unavailable: a later try may do better."""


class Runner:
    """All of it runs in the event loop. `added` is called for jobs of this server; those of others are found by looking."""

    def __init__(
        self, store: JobStore, executor: JobExecutor, owner: str, keep: float, on_answer: Callable[[], None], stats: JobStats | None = None
    ) -> None:
        """`keep`: seconds for which answers are stored. `on_answer` is called when one is stored."""
        self._store = store
        self._executor = executor
        self._owner = owner
        self._keep = keep
        self._on_answer = on_answer
        self._stats = stats or JobStats()
        self._waiting: set[JobTarget] = set()  # that may have queued jobs
        self._known: set[JobTarget] = set()  # that have been registered while this runs
        self._missing: dict[JobTarget, float] = {}  # since when they are not registered
        self._held: dict[str, tuple[JobRecord, asyncio.Task[None]]] = {}
        self._at_model: Counter[str] = Counter()  # jobs of this server that are not answered yet
        self._seconds: dict[str, float] = {}  # that a job of a model takes, in the mean
        self._ended: dict[str, asyncio.Event] = {}
        self._tasks = TaskGroup()
        self._wake = asyncio.Event()
        self._stopping = False

    async def run(self) -> None:
        """Claim whatever there is a place for, whenever something has changed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await _insist("jobs are not started", self._claim)

    async def tend(self) -> None:
        """Renew leases; find jobs whose servers have died, and those that were not announced; remove what has expired."""
        try:
            held = [(job.id, job.attempts) for job, _ in self._held.values()]
            for id in await self._store.renew(held, self._owner, LEASE) if held else ():
                self.cancel(id)
            await self._store.reclaim()
            await self._store.expire()
        except STORE_ERRORS as error:
            logger.warning("jobs are not looked after: %s", error.message)
        await self.look()

    async def look(self) -> None:
        """For jobs that another server has accepted."""
        with suppress(*STORE_ERRORS):  # `tend` reports them
            self._waiting |= await self._store.waiting()
            self.changed()

    def added(self, target: JobTarget) -> None:
        self._waiting.add(target)
        self._wake.set()

    def changed(self) -> None:
        """Models have come or gone, or have other workers."""
        if self._waiting:
            self._wake.set()

    def cancel(self, id: str) -> None:
        """It is no job of this server any more."""
        if id in self._held:
            self._held[id][1].cancel()

    def expected(self, job: JobRecord, ahead: int) -> int | None:
        """Whole seconds until it is answered, if its model goes on as it did; None where nothing is known."""
        seconds = self._seconds.get(job.model)
        if seconds is None:
            return None
        if job.state == "running":
            seconds -= time.time() - (job.started or 0.0)
        else:
            seconds *= (ahead + 1) / (self._executor.places((job.model, job.version)) or 1)
        return max(1, math.ceil(seconds))

    async def wait(self, id: str, seconds: float) -> None:
        """Until this server has answered it, or that long."""
        event = self._ended.setdefault(id, asyncio.Event())
        with suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
        self._ended.pop(id, None)

    async def stop(self, seconds: float, hurry: asyncio.Event) -> None:
        """Claim nothing more, and give the jobs at models so many seconds. What is left then, `close` queues again."""
        self._stopping = True
        ending = [asyncio.ensure_future(self._tasks.over()), asyncio.ensure_future(hurry.wait())]
        await asyncio.wait(ending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in ending:
            task.cancel()

    async def close(self) -> None:
        self._stopping = True
        held = [(job.id, job.attempts) for job, _ in self._held.values()]
        for _, task in list(self._held.values()):
            task.cancel()
        await self._tasks.over()
        with suppress(*STORE_ERRORS):  # then the leases run out
            await self._store.release(held, self._owner)

    async def _claim(self) -> None:
        wanted = self._wanted()
        if not wanted:
            return
        self._waiting -= wanted.keys()  # before, as one may be added meanwhile
        try:
            jobs = await self._store.claim(wanted, self._owner, LEASE)
        except BaseException:
            self._waiting |= wanted.keys()
            raise
        for job in jobs:
            self._at_model[job.model] += 1
            self._held[job.id] = job, self._tasks.begin(self._work(job))
        counts = Counter((job.model, job.version) for job in jobs)
        self._waiting |= {target for target, most in wanted.items() if counts[target] == most}

    def _wanted(self) -> dict[JobTarget, int]:
        wanted: dict[JobTarget, int] = {}
        taken = Counter(self._at_model)
        for target in () if self._stopping else self._waiting:
            places = self._executor.places(target)
            if places is not None:
                self._known.add(target)
                self._missing.pop(target, None)
            elif self._is_orphan(target):
                places = ORPHANS
            if (more := (places or 0) - taken[target[0]]) > 0:
                wanted[target] = more
                taken[target[0]] += more
        return wanted

    def _is_orphan(self, target: JobTarget) -> bool:
        """Whether its jobs are answered with the error that there is no such model."""
        if target in self._known and not self._store.shared:
            return True
        now = time.monotonic()
        return now - self._missing.setdefault(target, now) > GRACE

    async def _work(self, job: JobRecord) -> None:
        try:
            answer = await self._at(job)
            keep = (job.id, job.attempts, self._owner, answer, self._keep)
            if await _insist(f"the answer to job {job.id} is not stored", lambda: self._store.finish(*keep)):
                self._stats.answered(job, answer.status or 500)
            self._on_answer()
        finally:
            self._held.pop(job.id, None)
            if (event := self._ended.pop(job.id, None)) is not None:
                event.set()

    async def _at(self, job: JobRecord) -> StoredAnswer:
        """The answer of its model. The next job need not wait until it is stored."""
        began = time.monotonic()
        try:
            answer = await _insist(f"job {job.id} waits", lambda: self._executor.answer(job))
        finally:
            self._at_model[job.model] -= 1
            self._wake.set()
        spent, before = time.monotonic() - began, self._seconds.get(job.model)
        self._seconds[job.model] = spent if before is None else before * MEMORY + spent * (1 - MEMORY)
        return answer


async def _insist(what: str, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Call again where it is refused for now, with longer and longer pauses. `what` is logged, once."""
    pause = PAUSE
    while True:
        try:
            return await call()
        except (StoreFull, Unavailable) as error:
            if pause == PAUSE:
                logger.warning("%s: %s", what, error.message)
            await asyncio.sleep(max(pause, min(_retry_after(error), LONGEST_PAUSE)))
            pause = min(pause * 2, LONGEST_PAUSE)


def _retry_after(error: TsxError) -> float:
    return float(getattr(error, "retry_after", None) or 0.0)
