"""The runner of stored requests.

It claims jobs for this server's models, as many as these can run, and stores their answers.
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
from tsx_runtime.features.jobs.job_stats import JobStats
from tsx_runtime.features.jobs.storage.sql_store import SqlStore
from tsx_runtime.features.jobs.storage.store import Claim, JobRecord, JobTarget, StoredAnswer

LEASE_S = 30.0  # seconds until another server takes a job whose lease is not renewed
LOADING_GRACE_S = 60.0  # wait for a model that is not registered, as it may be loading
MAX_ORPHANS = 32  # jobs of one unknown model that get an error at a time
# Answers that wait to be stored. At this number no more jobs are started: the answers use
# memory, and the disk may stay full for long.
MAX_UNSTORED = 64
MIN_PAUSE_S = 0.5  # seconds before the first retry with a store or a model; they double
MAX_PAUSE_S = 30.0
MEAN_WEIGHT = 0.9  # the weight of earlier jobs in the moving average of a job's seconds
STORE_ERRORS = (StoreFull, StoreUnavailable)
ResultT = TypeVar("ResultT")

logger = logging.getLogger("tsx.jobs")


class JobExecutor(Protocol):
    """Submits a stored request to its model."""

    def capacity(self, target: JobTarget) -> int | None:
        """Return how many jobs a model may run at once, or None if it is not registered."""

    async def answer(self, job: JobRecord) -> StoredAnswer:
        """Return the response, or an error's response; withdraw the request when cancelled.

        Raises:
            Unavailable: A later attempt may succeed.
        """


class Runner:
    """Runs the jobs of a store, in the event loop.

    `notify_queued` reports a job that this server has accepted. Polling finds other servers' jobs.
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
        self._registered_targets: set[JobTarget] = set()  # targets that have been registered
        # The time since which a target is neither registered here nor running on another server.
        self._missing_since: dict[JobTarget, float] = {}
        self._claims: dict[Claim, asyncio.Task[None]] = {}
        self._running_models: dict[Claim, str] = {}  # the models of jobs that have no answer yet
        self._seconds: dict[str, float] = {}  # moving average of a job's seconds, by model
        # An event exists as long as a caller of `wait` holds it.
        self._end_events: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
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
        """Renew leases, and find jobs of servers that died and jobs accepted by other servers."""
        problem = ""
        try:
            for claim in (
                await self._store.renew(list(self._claims), self._owner, LEASE_S)
                if self._claims
                else ()
            ):
                if claim in self._claims:
                    self._claims[claim].cancel()
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
                self._missing_since.pop(target, None)
            self._waiting |= queued
            self.notify_change()

    def notify_queued(self, target: JobTarget) -> None:
        self._waiting.add(target)
        self._wake.set()

    def notify_change(self) -> None:
        """Note that models or their workers have changed."""
        if self._waiting:
            self._wake.set()

    def cancel(self, id: str) -> None:
        """Stop work on a job that is no longer this server's."""
        for claim, task in self._claims.items():
            if claim[0] == id:
                task.cancel()
        if event := self._end_events.get(id):
            event.set()

    def estimate_s(self, job: JobRecord, preceding_jobs: int) -> int | None:
        """Estimate the seconds until a job's answer; None if no job of its model has ended yet."""
        seconds = self._seconds.get(job.model)
        if seconds is None:
            return None
        if job.state == "running":
            seconds -= time.time() - (job.started or 0.0)
        else:
            seconds *= (preceding_jobs + 1) / (
                self._executor.capacity((job.model, job.version)) or 1
            )
        return max(1, math.ceil(seconds))

    async def wait(self, id: str, seconds: float) -> None:
        """Wait until this server has answered the job, the job is cancelled, or time is up."""
        await wait_for_event(self._end_events.setdefault(id, asyncio.Event()), seconds)

    async def stop(self, seconds: float, stop_now: asyncio.Event) -> None:
        """Claim no more jobs; wait up to `seconds`, or until `stop_now`, for the running ones.

        `close` then queues the unfinished jobs again.
        """
        self.stopping = True
        running = {id for id, _ in self._claims}
        for id, event in self._end_events.items():
            if id not in running:
                event.set()
        stop_conditions = [
            asyncio.ensure_future(self._tasks.wait_all()),
            asyncio.ensure_future(stop_now.wait()),
        ]
        await asyncio.wait(stop_conditions, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in stop_conditions:
            task.cancel()

    async def close(self) -> None:
        self.stopping = True
        for task in self._claims.values():
            task.cancel()
        await self._tasks.wait_all()
        with suppress(*STORE_ERRORS):  # Otherwise the leases run out.
            await self._store.release(self._owner)

    async def _claim(self) -> None:
        capacities = self._free_capacity()
        if not capacities:
            return
        self._waiting -= capacities.keys()  # Targets may be added during `claim`.
        try:
            jobs = await self._store.claim(capacities, self._owner, LEASE_S)
        except BaseException:
            self._waiting |= capacities.keys()
            raise
        for job in jobs:
            claim = job.id, job.attempts
            self._running_models[claim] = job.model
            self._claims[claim] = task = self._tasks.begin(self._run_job(job))
            # A callback also runs for a task that is cancelled before it begins.
            task.add_done_callback(partial(self._forget, claim))
        claimed_counts = Counter((job.model, job.version) for job in jobs)
        self._waiting |= {
            target for target, limit in capacities.items() if claimed_counts[target] == limit
        }

    def _free_capacity(self) -> dict[JobTarget, int]:
        capacities: dict[JobTarget, int] = {}
        running = Counter(self._running_models.values())
        if self.stopping or len(self._claims) - len(self._running_models) >= MAX_UNSTORED:
            return capacities
        for target in self._waiting:
            limit = self._executor.capacity(target)
            if limit is not None:
                self._registered_targets.add(target)
                self._missing_since.pop(target, None)
            elif self._is_orphan(target):
                limit = MAX_ORPHANS
            if (free_places := (limit or 0) - running[target[0]]) > 0:
                capacities[target] = free_places
                running[target[0]] += free_places
        return capacities

    def _is_orphan(self, target: JobTarget) -> bool:
        """Tell whether to answer the jobs of a target with the error that the model is unknown.

        For a while, another server of the store may have the model, or it may be loading.
        """
        if target in self._registered_targets and not self._store.shared:
            return True
        now = time.monotonic()
        return now - self._missing_since.setdefault(target, now) > (
            self._keep if self._store.shared else LOADING_GRACE_S
        )

    async def _run_job(self, job: JobRecord) -> None:
        start = time.monotonic()
        answer = await _retry(f"job {job.id} waits", lambda: self._executor.answer(job))
        # The next job may start while this answer is stored.
        self._running_models.pop((job.id, job.attempts))
        self._wake.set()
        elapsed_s, mean_s = time.monotonic() - start, self._seconds.get(job.model)
        self._seconds[job.model] = (
            elapsed_s if mean_s is None else mean_s * MEAN_WEIGHT + elapsed_s * (1 - MEAN_WEIGHT)
        )
        keep = (job.id, job.attempts, self._owner, answer, self._keep)
        if await _retry(
            f"the answer to job {job.id} is not stored", lambda: self._store.finish(*keep)
        ):
            self._stats.count_answer(job, answer.status or 500)
        self._on_answer(job)

    def _forget(self, claim: Claim, task: asyncio.Task[None]) -> None:
        del self._claims[claim]
        self._running_models.pop(claim, None)
        self._wake.set()
        if event := self._end_events.get(claim[0]):
            event.set()


async def _retry(problem: str, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Repeat a call while the store or model is unavailable, with growing pauses; log once."""
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
