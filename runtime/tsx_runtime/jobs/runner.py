"""The runner of stored requests.

It claims jobs for the models of this server, in bounded number, and stores their answers.
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

LEASE_S = 30.0  # seconds until another server takes a job whose lease is not renewed
LOADING_GRACE_S = 60.0  # wait for a model that is not registered: it may be loading
MAX_ORPHANS = 32  # jobs of one unknown model that are answered at a time
# Answers that wait to be stored. Beyond that no job is started: the disk may be full for long.
MAX_UNSTORED = 64
MIN_PAUSE_S = 0.5  # seconds before the next attempt at a store or a model; it doubles
MAX_PAUSE_S = 30.0
MEAN_WEIGHT = 0.9  # the weight of earlier jobs in the mean seconds of a job
STORE_ERRORS = (StoreFull, StoreUnavailable)
ResultT = TypeVar("ResultT")

logger = logging.getLogger("tsx.jobs")


class JobExecutor(Protocol):
    """Submits a stored request to its model."""

    def places(self, target: JobTarget) -> int | None:
        """Return how many jobs the model may hold: 0 without workers, None if not registered."""

    async def answer(self, job: JobRecord) -> StoredAnswer:
        """Return the response, or that of an error; withdraw the request when cancelled.

        Raises:
            Unavailable: A later attempt may succeed.
        """


class Runner:
    """Runs the jobs of a store, in the event loop.

    `added` reports jobs of this server. Jobs of other servers are found by polling.
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
        """Prepare to run jobs; store answers for `keep` seconds and pass them to `on_answer`."""
        self.stopping = False
        self._store = store
        self._executor = executor
        self._owner = owner
        self._keep = keep
        self._on_answer = on_answer
        self._stats = stats or JobStats()
        self._waiting: set[JobTarget] = set()  # targets that may have queued jobs
        self._known: set[JobTarget] = set()  # targets that have been registered
        # The time since when a target is not registered, and runs nowhere else.
        self._missing: dict[JobTarget, float] = {}
        self._held: dict[Claim, asyncio.Task[None]] = {}
        self._at_model: dict[Claim, str] = {}  # the models of jobs without an answer
        self._seconds: dict[str, float] = {}  # mean seconds of a job, by model
        # Events exist as long as somebody waits.
        self._ended: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        self._tasks = TaskGroup()
        self._wake = asyncio.Event()
        self._problem = ""  # the last logged problem of the store

    async def run(self) -> None:
        """Claim jobs up to the free capacity, whenever something has changed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await _retry("jobs are not started", self._claim)

    async def tend(self) -> None:
        """Renew leases; find jobs of servers that died, and jobs that were not announced."""
        problem = ""
        try:
            for claim in (
                await self._store.renew(list(self._held), self._owner, LEASE_S)
                if self._held
                else ()
            ):
                if claim in self._held:
                    self._held[claim].cancel()
            await self._store.reclaim()
        except STORE_ERRORS as error:
            problem = error.message
            if problem != self._problem:
                logger.warning("jobs stand still until this is solved: %s", problem)
        self._problem = problem
        await self.poll()

    async def clean(self) -> None:
        """Remove expired jobs and answers."""
        with suppress(*STORE_ERRORS):  # `tend` reports them.
            while await self._store.expire():
                pass

    async def poll(self) -> None:
        """Look for jobs that another server has accepted."""
        with suppress(*STORE_ERRORS):  # `tend` reports them.
            queued, running = await self._store.waiting()
            for target in running:
                self._missing.pop(target, None)
            self._waiting |= queued
            self.changed()

    def added(self, target: JobTarget) -> None:
        self._waiting.add(target)
        self._wake.set()

    def changed(self) -> None:
        """Note that models or their workers have changed."""
        if self._waiting:
            self._wake.set()

    def cancel(self, id: str) -> None:
        """Stop work on a job that is no longer this server's."""
        for claim, task in self._held.items():
            if claim[0] == id:
                task.cancel()
        if event := self._ended.get(id):
            event.set()

    def expected(self, job: JobRecord, ahead: int) -> int | None:
        """Return the whole seconds until a job's answer, from the mean of its model, or None."""
        seconds = self._seconds.get(job.model)
        if seconds is None:
            return None
        if job.state == "running":
            seconds -= time.time() - (job.started or 0.0)
        else:
            seconds *= (ahead + 1) / (self._executor.places((job.model, job.version)) or 1)
        return max(1, math.ceil(seconds))

    async def wait(self, id: str, seconds: float) -> None:
        """Wait until this server has answered a job, it is cancelled, or the time is over."""
        await wait_for_event(self._ended.setdefault(id, asyncio.Event()), seconds)

    async def stop(self, seconds: float, hurry: asyncio.Event) -> None:
        """Claim no more jobs, and give the running ones so many seconds.

        `close` queues the remaining ones again.
        """
        self.stopping = True
        running = {id for id, _ in self._held}
        for id, event in self._ended.items():
            if id not in running:
                event.set()
        ending = [
            asyncio.ensure_future(self._tasks.wait_all()),
            asyncio.ensure_future(hurry.wait()),
        ]
        await asyncio.wait(ending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in ending:
            task.cancel()

    async def close(self) -> None:
        self.stopping = True
        for task in self._held.values():
            task.cancel()
        await self._tasks.wait_all()
        with suppress(*STORE_ERRORS):  # Without it the leases run out.
            await self._store.release(self._owner)

    async def _claim(self) -> None:
        capacity = self._free_capacity()
        if not capacity:
            return
        self._waiting -= capacity.keys()  # removed first, as one may be added meanwhile
        try:
            jobs = await self._store.claim(capacity, self._owner, LEASE_S)
        except BaseException:
            self._waiting |= capacity.keys()
            raise
        for job in jobs:
            claim = job.id, job.attempts
            self._at_model[claim] = job.model
            self._held[claim] = task = self._tasks.begin(self._run_job(job))
            # Called even for a task that is cancelled before it begins.
            task.add_done_callback(partial(self._forget, claim))
        counts = Counter((job.model, job.version) for job in jobs)
        self._waiting |= {target for target, most in capacity.items() if counts[target] == most}

    def _free_capacity(self) -> dict[JobTarget, int]:
        capacity: dict[JobTarget, int] = {}
        running = Counter(self._at_model.values())
        if self.stopping or len(self._held) - len(self._at_model) >= MAX_UNSTORED:
            return capacity
        for target in self._waiting:
            places = self._executor.places(target)
            if places is not None:
                self._known.add(target)
                self._missing.pop(target, None)
            elif self._is_orphan(target):
                places = MAX_ORPHANS
            if (more := (places or 0) - running[target[0]]) > 0:
                capacity[target] = more
                running[target[0]] += more
        return capacity

    def _is_orphan(self, target: JobTarget) -> bool:
        """Tell whether the jobs of a target get the error that there is no such model.

        Until then another server may have it.
        """
        if target in self._known and not self._store.shared:
            return True
        now = time.monotonic()
        return now - self._missing.setdefault(target, now) > (
            self._keep if self._store.shared else LOADING_GRACE_S
        )

    async def _run_job(self, job: JobRecord) -> None:
        began = time.monotonic()
        answer = await _retry(f"job {job.id} waits", lambda: self._executor.answer(job))
        # The next job need not wait until this answer is stored.
        self._at_model.pop((job.id, job.attempts))
        self._wake.set()
        spent, before = time.monotonic() - began, self._seconds.get(job.model)
        self._seconds[job.model] = (
            spent if before is None else before * MEAN_WEIGHT + spent * (1 - MEAN_WEIGHT)
        )
        keep = (job.id, job.attempts, self._owner, answer, self._keep)
        if await _retry(
            f"the answer to job {job.id} is not stored", lambda: self._store.finish(*keep)
        ):
            self._stats.answered(job, answer.status or 500)
        self._on_answer(job)

    def _forget(self, claim: Claim, task: asyncio.Task[None]) -> None:
        del self._held[claim]
        self._at_model.pop(claim, None)
        self._wake.set()
        if event := self._ended.get(claim[0]):
            event.set()


async def _retry(problem: str, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Repeat a call that is refused for now, after growing pauses; log the problem once."""
    pause = MIN_PAUSE_S
    while True:
        try:
            return await call()
        except (StoreFull, Unavailable) as error:
            if pause == MIN_PAUSE_S:
                logger.warning("%s: %s", problem, error.message)
            retry_after = getattr(error, "retry_after", None) or 0.0
            await asyncio.sleep(max(pause, min(retry_after, MAX_PAUSE_S)))
            pause = min(pause * 2, MAX_PAUSE_S)
