"""Asynchronous answers of a server: its store, and the tasks that run jobs and send callbacks."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack
from pathlib import Path

from tsx_runtime.core.concurrency.periodic import repeat, running
from tsx_runtime.errors import SettingError
from tsx_runtime.jobs.callbacks import CallbackSender
from tsx_runtime.jobs.job_stats import JobStats
from tsx_runtime.jobs.keyed_runs import KeyedRuns
from tsx_runtime.jobs.runner import LEASE_S, JobExecutor, Runner
from tsx_runtime.jobs.sql_store import SqlStore
from tsx_runtime.jobs.sqlite import SqliteStore
from tsx_runtime.jobs.store import JOB, AnswerKey, JobRecord, JobState, NewJob, StoredAnswer
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import OFF, POSTGRES, SQLITE, Settings
from tsx_runtime.sources.urls import AllowList

JOBS_PER_CLIENT = 1000  # the default if other machines can connect
POLL_S = 1.0  # between searches for jobs that other servers have accepted
TEND_S = LEASE_S / 3


class Jobs:
    """The jobs of a server. Nothing is opened before `begin`, which the first job calls."""

    def __init__(self, settings: Settings, store: SqlStore, executor: JobExecutor) -> None:
        """Prepare the jobs.

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
        signing = [
            text
            for text in (settings.job_callback_secret, settings.job_callback_old_secret)
            if text
        ]
        self.callbacks = CallbackSender(store, hosts, signing, stats=self.stats)
        self.runner = Runner(
            store, executor, self.owner, self.keep, self.callbacks.added, self.stats
        )
        self._most = settings.max_queued_jobs
        default = 0 if parse_address(settings.inference_address).is_local else JOBS_PER_CLIENT
        self._most_of_client = (
            default if settings.max_jobs_per_client is None else settings.max_jobs_per_client
        )
        self._tasks = AsyncExitStack()
        self._begun = False

    async def begin(self) -> None:
        """Open the store and run its jobs until `close`."""
        if self._begun:
            return
        self._begun = True
        polling = [repeat(POLL_S, self._poll)] if self.store.shared else []
        coroutines = [
            self.runner.run(),
            self.callbacks.run(),
            self._tend(),
            repeat(TEND_S, self.runner.clean),
            *polling,
        ]
        await self._tasks.enter_async_context(
            running("asynchronous answers stand still", *coroutines)
        )

    async def resume(self) -> None:
        """Call `begin` if there may be jobs of an earlier server."""
        if not self._begun and self.store.exists():
            await self.begin()

    async def stop(self, seconds: float, hurry: asyncio.Event) -> None:
        """Start no more jobs, and give the running ones so many seconds.

        The next server runs the jobs that remain after `close`.
        """
        if self._begun:
            await self.runner.stop(seconds, hurry)

    async def close(self) -> None:
        if self._begun:
            await self._tasks.aclose()
            await self.runner.close()
            await self.store.close()

    async def add(self, job: NewJob, answer: tuple[AnswerKey, StoredAnswer] | None = None) -> None:
        """Store a job; it is on the disk on return.

        Raises:
            JobsFull: Too many jobs are queued or running.
            StoreFull: The disk is full.
            StoreUnavailable: The store cannot be used.
        """
        await self.begin()
        await self.store.add(
            job, self._most, self._most_of_client if job.client else 0, answer, self.owner
        )
        self.runner.added((job.model, job.version))

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
        """Return the number of queued jobs before this one, and seconds until its answer."""
        ahead = await self.store.ahead(job) if job.state == "queued" else 0
        return ahead, self.runner.expected(job, ahead)

    async def wait(self, id: str, seconds: float) -> StoredAnswer | None:
        """Return the answer, or None if it does not come within so many seconds."""
        end = time.monotonic() + seconds
        while True:
            remaining_s = max(0.0, end - time.monotonic())
            # Another server does not report its answers.
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
        """Cancel a job; return its new record, which may be done, or None."""
        if not await self.is_open():
            return None
        previous = await self.store.get(id)
        job = await self.store.cancel(id, self.keep)
        if previous is not None and job is not None and job.state == "cancelled" != previous.state:
            self.stats.finished[job.model, "cancelled"] += 1
        self.runner.cancel(id)
        return job

    async def retry(self, id: str) -> JobRecord | None:
        """Queue a job again unless its request has expired; return its new record, or None."""
        if not await self.is_open():
            return None
        job = await self.store.retry(id)
        if job is not None:
            self.runner.added((job.model, job.version))
        return job

    async def is_open(self) -> bool:
        """Tell whether there is a store; a request for a job does not make one."""
        await self.resume()
        return self._begun

    async def _poll(self) -> None:
        if self.store.shared:
            await self.runner.poll()

    async def _tend(self) -> None:
        await self.runner.tend()
        await repeat(TEND_S, self.runner.tend)


def make_store(settings: Settings, directory: Path | None) -> SqlStore | None:
    """Return the store of `jobs_store`, else a file in `directory`, or None without one.

    Raises:
        SettingError: The store cannot be used.
    """
    location = settings.jobs_store
    if location == OFF:
        return None
    if location is not None and location.startswith(POSTGRES):
        return postgres_store(location)
    if location is not None:
        return SqliteStore(Path(location.removeprefix(SQLITE)), settings.max_jobs_size)
    return (
        None
        if directory is None
        else SqliteStore(directory / "jobs.sqlite", settings.max_jobs_size)
    )


def postgres_store(url: str) -> SqlStore:
    """Return the store in a PostgreSQL database.

    Raises:
        SettingError: The driver is not installed, or the URL is wrong.
    """
    try:
        from tsx_runtime.jobs.postgres import PostgresStore  # an optional dependency
    except ImportError as error:
        raise SettingError(
            "jobs_store is a PostgreSQL URL, which needs the extra postgres: pip install"
            " 'tsx-serve[postgres]'"
        ) from error
    try:
        return PostgresStore(url)
    except PostgresStore.driver_error:  # Its text may hold the password.
        text = (
            "jobs_store is not a URL of a PostgreSQL database. Write"
            " postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        )
        raise SettingError(
            f"{text}, with the signs @ / : % of the password percent-encoded."
        ) from None
