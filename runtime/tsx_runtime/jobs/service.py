"""Asynchronous answers of one server: its store, and the tasks that run jobs and send callbacks."""

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
from tsx_runtime.jobs.runner import LEASE, JobExecutor, Runner
from tsx_runtime.jobs.sql_store import SqlStore
from tsx_runtime.jobs.sqlite import SqliteStore
from tsx_runtime.jobs.store import JOB, AnswerKey, JobRecord, JobState, NewJob, StoredAnswer
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import OFF, POSTGRES, SQLITE, Settings
from tsx_runtime.sources.urls import AllowList

JOBS_PER_CLIENT = 1000  # where other machines can connect and nothing else is set
LOOK = 1.0  # seconds between two looks for the jobs that other servers have accepted
TEND = LEASE / 3


class Jobs:
    """Nothing is opened before `begin`, which the first job calls."""

    def __init__(self, settings: Settings, store: SqlStore, executor: JobExecutor) -> None:
        """Raises SettingError."""
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
        own = 0 if parse_address(settings.inference_address).is_local else JOBS_PER_CLIENT
        self._most_of_client = (
            own if settings.max_jobs_per_client is None else settings.max_jobs_per_client
        )
        self._tasks = AsyncExitStack()
        self._begun = False

    async def begin(self) -> None:
        """Open the store, and run what is in it, from now on until `close`."""
        if self._begun:
            return
        self._begun = True
        looking = [repeat(LOOK, self._look)] if self.store.shared else []
        works = [
            self.runner.run(),
            self.callbacks.run(),
            self._tend(),
            repeat(TEND, self.runner.clean),
            *looking,
        ]
        await self._tasks.enter_async_context(running("asynchronous answers stand still", *works))

    async def resume(self) -> None:
        """`begin` where there may be jobs of an earlier server."""
        if not self._begun and self.store.exists():
            await self.begin()

    async def stop(self, seconds: float, hurry: asyncio.Event) -> None:
        """Start no more jobs, and give those that are running so many seconds; what is left after
        `close` is run by the next server.
        """
        if self._begun:
            await self.runner.stop(seconds, hurry)

    async def close(self) -> None:
        if self._begun:
            await self._tasks.aclose()
            await self.runner.close()
            await self.store.close()

    async def add(self, job: NewJob, answer: tuple[AnswerKey, StoredAnswer] | None = None) -> None:
        """Once it returns, the job is on the disk. Raises JobsFull, StoreFull, StoreUnavailable."""
        await self.begin()
        await self.store.add(
            job, self._most, self._most_of_client if job.client else 0, answer, self.owner
        )
        self.runner.added((job.model, job.version))

    async def get(self, id: str) -> JobRecord | None:
        return await self.store.get(id) if await self.is_open() else None

    async def queue(self) -> tuple[dict[tuple[str, JobState], int], dict[str, float]]:
        """Jobs by model and state, and for how many seconds the oldest queued one of each model has
        waited.
        """
        return (
            (await self.store.counts(), await self.store.oldest())
            if await self.is_open()
            else ({}, {})
        )

    async def answer(self, id: str) -> StoredAnswer | None:
        return await self.store.get_answer(AnswerKey(JOB, "", id))

    async def progress(self, job: JobRecord) -> tuple[int, int | None]:
        """How many queued jobs of its model go before it, and whole seconds until its answer, if
        they are known.
        """
        ahead = await self.store.ahead(job) if job.state == "queued" else 0
        return ahead, self.runner.expected(job, ahead)

    async def wait(self, id: str, seconds: float) -> StoredAnswer | None:
        """Its answer, if it is there within so many seconds."""
        end = time.monotonic() + seconds
        while True:
            left = max(0.0, end - time.monotonic())
            await self.runner.wait(
                id, min(left, LOOK) if self.store.shared else left
            )  # another server tells nothing of its answers
            answer = await self.answer(id)
            if answer is not None or not self.store.shared or not left or self.runner.stopping:
                return answer

    async def cancel(self, id: str) -> JobRecord | None:
        """The job as it is then: cancelled, or done before."""
        if not await self.is_open():
            return None
        before = await self.store.get(id)
        job = await self.store.cancel(id, self.keep)
        if before is not None and job is not None and job.state == "cancelled" != before.state:
            self.stats.finished[job.model, "cancelled"] += 1
        self.runner.cancel(id)
        return job

    async def retry(self, id: str) -> JobRecord | None:
        """The job as it is then: queued, unless its request has expired."""
        if not await self.is_open():
            return None
        job = await self.store.retry(id)
        if job is not None:
            self.runner.added((job.model, job.version))
        return job

    async def is_open(self) -> bool:
        """A request for a job makes no store where there is none."""
        await self.resume()
        return self._begun

    async def _look(self) -> None:
        if self.store.shared:
            await self.runner.look()

    async def _tend(self) -> None:
        await self.runner.tend()
        await repeat(TEND, self.runner.tend)


def make_store(settings: Settings, directory: Path | None) -> SqlStore | None:
    """The store that `jobs_store` names, else a file in the directory of the server's state; None
    without one. Raises SettingError.
    """
    named = settings.jobs_store
    if named == OFF:
        return None
    if named is not None and named.startswith(POSTGRES):
        return postgres_store(named)
    if named is not None:
        return SqliteStore(Path(named.removeprefix(SQLITE)), settings.max_jobs_size)
    return (
        None
        if directory is None
        else SqliteStore(directory / "jobs.sqlite", settings.max_jobs_size)
    )


def postgres_store(url: str) -> SqlStore:
    """Raises SettingError."""
    try:
        from tsx_runtime.jobs.postgres import PostgresStore  # here, as its driver is an extra
    except ImportError as error:
        raise SettingError(
            "jobs_store is a PostgreSQL URL, which needs the extra postgres: pip install"
            " 'tsx-serve[postgres]'"
        ) from error
    try:
        return PostgresStore(url)
    except PostgresStore.driver_error:  # its text may hold the password
        text = (
            "jobs_store is not a URL of a PostgreSQL database. Write"
            " postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        )
        raise SettingError(
            f"{text}, with the signs @ / : % of the password percent-encoded."
        ) from None
