"""Runs stored requests: claims jobs for the models of this server, a bounded number at a time, and
stores their answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from tsx_runtime.core.concurrency.events import wait_for_event
from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.errors import StoreFull, StoreUnavailable, Unavailable
from tsx_runtime.jobs.job_stats import JobStats
from tsx_runtime.jobs.sql_store import SqlStore
from tsx_runtime.jobs.store import Claim, JobRecord, JobTarget, StoredAnswer

LEASE = 30.0  # seconds after which another server takes a job whose server does not renew its lease
GRACE = 60.0  # seconds that a job waits for a model which is not registered: it may be loading
ORPHANS = 32  # jobs of one unknown model that are answered at a time
# answers that wait to be stored: more, and no job is started, since the disk may be full for long
MOST_UNSTORED = 64
PAUSE = 0.5  # seconds before the next try where a store or a model refuses; it doubles
LONGEST_PAUSE = 30.0
MEMORY = 0.9  # the weight of earlier jobs in the mean time of one
STORE_ERRORS = (StoreFull, StoreUnavailable)
ResultT = TypeVar("ResultT")

logger = logging.getLogger("tsx.jobs")


class JobExecutor(Protocol):
    """Submits a stored request to its model."""

    def places(self, target: JobTarget) -> int | None:
        """How many jobs may be at the model at once, 0 while it has no workers; None where it is
        not registered.
        """

    async def answer(self, job: JobRecord) -> StoredAnswer:
        """The model's answer, or that of an error; cancelled, it withdraws the request.

        Raises Unavailable: a later try may do better.
        """


class Runner:
    """All of it runs in the event loop.

    `added` is called for jobs of this server; those of others are found by looking.
    """

    def __init__(
        self,
        store: SqlStore,
        executor: JobExecutor,
        owner: str,
        keep: float,
        on_answer: Callable[[JobRecord], None],
        stats: JobStats | None = None,
    ) -> None:
        """`keep`: seconds for which answers are stored. `on_answer` is called when one is
        stored.
        """
        self.stopping = False
        self._store = store
        self._executor = executor
        self._owner = owner
        self._keep = keep
        self._on_answer = on_answer
        self._stats = stats or JobStats()
        self._waiting: set[JobTarget] = set()  # that may have queued jobs
        self._known: set[JobTarget] = set()  # that have been registered while this runs
        self._missing: dict[
            JobTarget, float
        ] = {}  # since when they are not registered, and run nowhere else
        self._held: dict[Claim, asyncio.Task[None]] = {}
        self._at_model: dict[Claim, str] = {}  # the model of each that is not answered yet
        self._seconds: dict[str, float] = {}  # that a job of a model takes, in the mean
        # As long as somebody waits.
        self._ended: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        self._tasks = TaskGroup()
        self._wake = asyncio.Event()
        self._problem = ""  # of the store, as it was logged

    async def run(self) -> None:
        """Claim whatever there is a place for, whenever something has changed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await _insist("jobs are not started", self._claim)

    async def tend(self) -> None:
        """Renew leases; find jobs whose servers have died, and those that were not announced."""
        problem = ""
        try:
            for claim in (
                await self._store.renew(list(self._held), self._owner, LEASE) if self._held else ()
            ):
                if claim in self._held:
                    self._held[claim].cancel()
            await self._store.reclaim()
        except STORE_ERRORS as error:
            problem = error.message
            if problem != self._problem:
                logger.warning("jobs stand still until this is solved: %s", problem)
        self._problem = problem
        await self.look()

    async def clean(self) -> None:
        """Remove what has expired."""
        with suppress(*STORE_ERRORS):  # `tend` reports them
            while await self._store.expire():
                pass

    async def look(self) -> None:
        """For jobs that another server has accepted."""
        with suppress(*STORE_ERRORS):  # `tend` reports them
            queued, running = await self._store.waiting()
            for target in running:
                self._missing.pop(target, None)
            self._waiting |= queued
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
        for claim, task in self._held.items():
            if claim[0] == id:
                task.cancel()
        if event := self._ended.get(id):
            event.set()

    def expected(self, job: JobRecord, ahead: int) -> int | None:
        """Whole seconds until it is answered, if its model goes on as it did; None where nothing is
        known.
        """
        seconds = self._seconds.get(job.model)
        if seconds is None:
            return None
        if job.state == "running":
            seconds -= time.time() - (job.started or 0.0)
        else:
            seconds *= (ahead + 1) / (self._executor.places((job.model, job.version)) or 1)
        return max(1, math.ceil(seconds))

    async def wait(self, id: str, seconds: float) -> None:
        """Until this server has answered it, or it is cancelled, or that long."""
        await wait_for_event(self._ended.setdefault(id, asyncio.Event()), seconds)

    async def stop(self, seconds: float, hurry: asyncio.Event) -> None:
        """Claim nothing more, and give the jobs at models so many seconds.

        What is left then, `close` queues again.
        """
        self.stopping = True
        running = {id for id, _ in self._held}
        for id, event in self._ended.items():
            if id not in running:
                event.set()
        ending = [asyncio.ensure_future(self._tasks.over()), asyncio.ensure_future(hurry.wait())]
        await asyncio.wait(ending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in ending:
            task.cancel()

    async def close(self) -> None:
        self.stopping = True
        for task in self._held.values():
            task.cancel()
        await self._tasks.over()
        with suppress(*STORE_ERRORS):  # then the leases run out
            await self._store.release(self._owner)

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
            claim = job.id, job.attempts
            self._at_model[claim] = job.model
            self._held[claim] = task = self._tasks.begin(self._work(job))
            task.add_done_callback(
                partial(self._left, claim)
            )  # also of one that is cancelled before it begins
        counts = Counter((job.model, job.version) for job in jobs)
        self._waiting |= {target for target, most in wanted.items() if counts[target] == most}

    def _wanted(self) -> dict[JobTarget, int]:
        wanted: dict[JobTarget, int] = {}
        taken = Counter(self._at_model.values())
        if self.stopping or len(self._held) - len(self._at_model) >= MOST_UNSTORED:
            return wanted
        for target in self._waiting:
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
        """Whether its jobs are answered with the error that there is no such model: another server
        may have it.
        """
        if target in self._known and not self._store.shared:
            return True
        now = time.monotonic()
        return now - self._missing.setdefault(target, now) > (
            self._keep if self._store.shared else GRACE
        )

    async def _work(self, job: JobRecord) -> None:
        began = time.monotonic()
        answer = await _insist(f"job {job.id} waits", lambda: self._executor.answer(job))
        self._at_model.pop(
            (job.id, job.attempts)
        )  # the next job need not wait until this answer is stored
        self._wake.set()
        spent, before = time.monotonic() - began, self._seconds.get(job.model)
        self._seconds[job.model] = (
            spent if before is None else before * MEMORY + spent * (1 - MEMORY)
        )
        keep = (job.id, job.attempts, self._owner, answer, self._keep)
        if await _insist(
            f"the answer to job {job.id} is not stored", lambda: self._store.finish(*keep)
        ):
            self._stats.answered(job, answer.status or 500)
        self._on_answer(job)

    def _left(self, claim: Claim, task: asyncio.Task[None]) -> None:
        del self._held[claim]
        self._at_model.pop(claim, None)
        self._wake.set()
        if event := self._ended.get(claim[0]):
            event.set()


async def _insist(what: str, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Call again where it is refused for now, with longer and longer pauses.

    `what` is logged, once.
    """
    pause = PAUSE
    while True:
        try:
            return await call()
        except (StoreFull, Unavailable) as error:
            if pause == PAUSE:
                logger.warning("%s: %s", what, error.message)
            retry_after = getattr(error, "retry_after", None) or 0.0
            await asyncio.sleep(max(pause, min(retry_after, LONGEST_PAUSE)))
            pause = min(pause * 2, LONGEST_PAUSE)
