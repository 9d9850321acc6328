"""Asynchronous answers of a server: the store, and the tasks that run jobs and send callbacks."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack

from tsx_runtime.core.concurrency.periodic import repeat, running
from tsx_runtime.errors import SettingError
from tsx_runtime.features.jobs.callbacks import CallbackSender
from tsx_runtime.features.jobs.job_stats import JobStats
from tsx_runtime.features.jobs.keyed_runs import KeyedRuns
from tsx_runtime.features.jobs.runner import LEASE_S, JobExecutor, Runner
from tsx_runtime.features.jobs.settings import JobsSettings
from tsx_runtime.features.jobs.storage.sql_store import SqlStore
from tsx_runtime.features.jobs.storage.store import (
    JOB,
    AnswerKey,
    JobRecord,
    JobState,
    NewJob,
    StoredAnswer,
)
from tsx_runtime.sources.urls import AllowList

JOBS_PER_CLIENT = 1000  # the default limit if other machines can connect
POLL_S = 1.0  # pause between searches for jobs that other servers have accepted
TEND_S = LEASE_S / 3


class Jobs:
    """The jobs of a server. The first job calls `begin`, which opens the store."""

    def __init__(
        self, settings: JobsSettings, store: SqlStore, executor: JobExecutor, *, is_local: bool
    ) -> None:
        """Prepare the jobs; with `is_local`, only this machine can connect.

        Raises:
            SettingError: The settings contradict each other.
        """
        if settings.job_callback_hosts and not settings.job_callback_secret:
            raise SettingError(
                "job_callback_hosts is set, but job_callback_secret, which callbacks are signed"
                " with, is not. Set both."
            )
        self.store = store
        self.owner = secrets.token_hex(8)
        self.keep = float(settings.job_retention)
        self.stats = JobStats()
        self.keyed_runs = KeyedRuns(
            store, self.owner, settings.idempotency_retention, settings.max_kept_answer, self.begin
        )
        hosts = AllowList(settings.job_callback_hosts, "job_callback_hosts")
        signing_secrets = [
            text
            for text in (settings.job_callback_secret, settings.job_callback_old_secret)
            if text
        ]
        self.callbacks = CallbackSender(store, hosts, signing_secrets, stats=self.stats)
        self.runner = Runner(
            store, executor, self.owner, self.keep, self.callbacks.notify_answer, self.stats
        )
        self._max_jobs = settings.max_queued_jobs
        default = 0 if is_local else JOBS_PER_CLIENT
        self._max_client_jobs = (
            default if settings.max_jobs_per_client is None else settings.max_jobs_per_client
        )
        self._tasks = AsyncExitStack()
        self._is_begun = False

    async def begin(self) -> None:
        """Open the store and run its jobs until `close`."""
        if self._is_begun:
            return
        self._is_begun = True
        pollers = [repeat(POLL_S, self._poll)] if self.store.shared else []
        coroutines = [
            self.runner.run(),
            self.callbacks.run(),
            self._tend(),
            repeat(TEND_S, self.runner.clean),
            *pollers,
        ]
        await self._tasks.enter_async_context(
            running("asynchronous answers stand still", *coroutines)
        )

    async def resume(self) -> None:
        """Call `begin` if there may be jobs of an earlier server."""
        if not self._is_begun and self.store.exists():
            await self.begin()

    async def stop(self, seconds: float, stop_now: asyncio.Event) -> None:
        """Start no more jobs; wait up to `seconds`, or until `stop_now`, for the running ones.

        The next server runs the jobs that are unfinished at `close`.
        """
        if self._is_begun:
            await self.runner.stop(seconds, stop_now)

    async def close(self) -> None:
        if self._is_begun:
            await self._tasks.aclose()
            await self.runner.close()
            await self.store.close()

    async def add(self, job: NewJob, answer: tuple[AnswerKey, StoredAnswer] | None = None) -> None:
        """Store a job on the disk.

        Raises:
            JobsFull: Too many jobs are queued or running.
            StoreFull: The disk is full.
            StoreUnavailable: The store cannot be used.
        """
        await self.begin()
        await self.store.add(
            job, self._max_jobs, self._max_client_jobs if job.client else 0, answer, self.owner
        )
        self.runner.notify_queued((job.model, job.version))

    async def get(self, id: str) -> JobRecord | None:
        return await self.store.get(id) if await self.is_open() else None

    async def queue(self) -> tuple[dict[tuple[str, JobState], int], dict[str, float]]:
        """Return counts by model and state, and the wait of each model's oldest queued job."""
        return (
            (await self.store.counts(), await self.store.oldest())
            if await self.is_open()
            else ({}, {})
        )

    async def answer(self, id: str) -> StoredAnswer | None:
        return await self.store.get_answer(AnswerKey(JOB, "", id))

    async def progress(self, job: JobRecord) -> tuple[int, int | None]:
        """Return the number of queued jobs before this one, and the seconds until its answer."""
        preceding_jobs = await self.store.count_preceding(job) if job.state == "queued" else 0
        return preceding_jobs, self.runner.estimate_s(job, preceding_jobs)

    async def wait(self, id: str, seconds: float) -> StoredAnswer | None:
        """Return the answer, or None if it does not come within `seconds`."""
        end = time.monotonic() + seconds
        while True:
            remaining_s = max(0.0, end - time.monotonic())
            # `runner.wait` does not notice other servers' answers, so a shared store is polled.
            await self.runner.wait(
                id, min(remaining_s, POLL_S) if self.store.shared else remaining_s
            )
            answer = await self.answer(id)
            if (
                answer is not None
                or not self.store.shared
                or not remaining_s
                or self.runner.stopping
            ):
                return answer

    async def cancel(self, id: str) -> JobRecord | None:
        """Cancel a job; return its new record (perhaps it was already done), or None if unknown."""
        if not await self.is_open():
            return None
        old_record = await self.store.get(id)
        job = await self.store.cancel(id, self.keep)
        if (
            old_record is not None
            and job is not None
            and job.state == "cancelled" != old_record.state
        ):
            self.stats.finished[job.model, "cancelled"] += 1
        self.runner.cancel(id)
        return job

    async def retry(self, id: str) -> JobRecord | None:
        """Queue a job again unless its request has expired; return its new record, or None."""
        if not await self.is_open():
            return None
        job = await self.store.retry(id)
        if job is not None:
            self.runner.notify_queued((job.model, job.version))
        return job

    async def is_open(self) -> bool:
        """Tell whether the store is open; open it if it exists, but do not create it."""
        await self.resume()
        return self._is_begun

    async def _poll(self) -> None:
        if self.store.shared:
            await self.runner.poll()

    async def _tend(self) -> None:
        await self.runner.tend()
        await repeat(TEND_S, self.runner.tend)
