"""Callbacks: where they may be sent, and when they are retried."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.kit.stored_jobs import ANSWER, QUEUE_LIMIT, a_new_job
from tsx_runtime.errors import BadRequest, SettingError
from tsx_runtime.features.jobs import callbacks, receivers
from tsx_runtime.features.jobs.callbacks import CallbackSender, backoff, signature
from tsx_runtime.features.jobs.service import Jobs
from tsx_runtime.features.jobs.storage.sqlite import SqliteStore
from tsx_runtime.features.jobs.storage.store import DueCallback
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources.urls import AllowList

pytestmark = pytest.mark.anyio


class WatchedStore(SqliteStore):
    """A store that records the end of each attempt in `ends`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.ends: asyncio.Queue[tuple[float | None, str]] = asyncio.Queue()

    async def end_callback(self, id: str, retry_in: float | None, error: str) -> None:
        await super().end_callback(id, retry_in, error)
        self.ends.put_nowait((retry_in, error))

    async def add_finished(self, url: str, id: str = "a") -> None:
        """Add a job whose callback is due."""
        await self.add(a_new_job(id, callback=url), QUEUE_LIMIT)
        await self.claim({("m", ""): 1}, "me", 60)
        await self.finish(id, 1, "me", ANSWER, 60)


@pytest.fixture
async def job_store(tmp_path: Path) -> AsyncIterator[WatchedStore]:
    job_store = WatchedStore(tmp_path / "jobs.sqlite")
    yield job_store
    await job_store.close()


@contextlib.asynccontextmanager
async def sender(job_store: WatchedStore, hosts: Sequence[str] = ()) -> AsyncIterator[None]:
    """Send the callbacks of a store in the background."""
    callback_sender = CallbackSender(job_store, AllowList(hosts), ["secret"], lambda: 0.5)
    task = asyncio.create_task(callback_sender.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def end_of_attempt(
    job_store: WatchedStore, hosts: list[str], url: str, id: str = "a"
) -> tuple[float | None, str]:
    await job_store.add_finished(url, id)
    async with sender(job_store, hosts):
        return await asyncio.wait_for(job_store.ends.get(), 30)


async def test_a_host_pattern_does_not_allow_private_addresses(
    job_store: WatchedStore, caplog: pytest.LogCaptureFixture
) -> None:
    url = "http://localhost:9/?token=secret"
    with caplog.at_level(logging.WARNING, "tsx.jobs"):
        retry_in, error = await end_of_attempt(job_store, ["http://.*"], url)
    assert retry_in == 2.0
    assert "not public" in error
    assert "secret" not in caplog.text


async def test_a_host_that_is_no_longer_allowed_gets_no_callback(job_store: WatchedStore) -> None:
    _, error = await end_of_attempt(job_store, ["a.example"], "http://b.example/")
    assert error == "job_callback_hosts does not allow it any more"


async def test_a_refused_connection_is_retried(job_store: WatchedStore) -> None:
    retry_in, _ = await end_of_attempt(job_store, ["localhost:9"], "http://localhost:9/")
    assert retry_in == 2.0


async def test_an_ending_sender_leaves_its_callback_to_the_next_one(
    job_store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_started, may_finish = threading.Event(), threading.Event()

    def post(self: CallbackSender, due: DueCallback) -> int:
        has_started.set()
        may_finish.wait(30)
        return 200

    monkeypatch.setattr(CallbackSender, "_post", post)
    await job_store.add_finished("http://a.example/")
    async with sender(job_store, ["a.example"]):
        await asyncio.to_thread(has_started.wait, 30)
    await job_store.close()
    may_finish.set()
    await asyncio.sleep(0)
    assert job_store.ends.empty()
    assert job_store._thread is None


async def test_an_unexpected_callback_failure_is_retried_but_not_forever(
    job_store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post(self: CallbackSender, due: DueCallback) -> int:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(CallbackSender, "_post", post)
    for id, attempts, retry_in in (("a", callbacks.MAX_ATTEMPTS, 2.0), ("b", 1, None)):
        monkeypatch.setattr(callbacks, "MAX_ATTEMPTS", attempts)
        end = await end_of_attempt(job_store, ["a.example"], "http://a.example/", id)
        assert end == (retry_in, "RuntimeError: unexpected")


async def test_an_unresponsive_receiver_does_not_delay_others(
    job_store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_finish, hanging_jobs = threading.Event(), []

    def post(self: CallbackSender, due: DueCallback) -> int:
        if due.url.startswith("http://dead.example/"):
            hanging_jobs.append(due.id)
            may_finish.wait(30)
        return 200

    monkeypatch.setattr(CallbackSender, "_post", post)
    for number in range(callbacks.MAX_CALLS + 1):
        await job_store.add_finished("http://dead.example/", f"dead-{number}")
    await job_store.add_finished("http://well.example/", "well")
    async with sender(job_store):
        try:
            # Callbacks to dead.example hang, so this is the end of the one to well.example.
            assert await asyncio.wait_for(job_store.ends.get(), 25) == (None, "")
            assert len(hanging_jobs) == receivers.MAX_CALLS
        finally:
            may_finish.set()
        for _ in range(callbacks.MAX_CALLS + 1):
            assert await asyncio.wait_for(job_store.ends.get(), 30) == (None, "")


@pytest.mark.parametrize(
    ("url", "normalized_url"),
    [
        ("HTTPS://A.Example/Done?x=1", "https://a.example/Done?x=1"),
        ("https://a.example:0443?x=1", "https://a.example:443/?x=1"),
        ("https://[2001:DB8::1]:443/", "https://[2001:db8::1]:443/"),
    ],
)
def test_callback_urls_are_normalized(tmp_path: Path, url: str, normalized_url: str) -> None:
    job_store = SqliteStore(tmp_path / "jobs.sqlite")
    callback_sender = CallbackSender(job_store, AllowList(["https://.*"]), ["secret"])
    assert callback_sender.check(url) == normalized_url
    assert normalized_url.startswith(receivers.receiver_of(normalized_url))


def test_a_callback_is_signed_with_the_new_and_the_old_secret(tmp_path: Path) -> None:
    new, old = "n" * 16, "o" * 16
    settings = Settings(
        job_callback_hosts=["a.example"], job_callback_secret=new, job_callback_old_secret=old
    )
    # Nothing runs, so a registry is not needed.
    jobs = Jobs(settings, SqliteStore(tmp_path / "jobs.sqlite"), None)  # type: ignore[arg-type]
    due = DueCallback("a", "http://a.example/", 1, "id", ANSWER)
    seconds, *signatures = jobs.callbacks._headers(due)["x-tsx-signature"].split(",")
    now = int(seconds.removeprefix("t="))
    assert signatures == [
        f"v1={signature(secret.encode(), now, 'a', ANSWER.status, ANSWER.body)}"
        for secret in (new, old)
    ]


def test_pauses_double_up_to_an_hour_with_jitter() -> None:
    assert [backoff(attempts, 0.5) for attempts in (1, 2, 3, 20)] == [2.0, 4.0, 8.0, 3600.0]
    assert (backoff(3, 0.0), backoff(3, 1.0)) == (4.0, 12.0)


def test_callbacks_need_allowed_hosts_and_a_secret(tmp_path: Path) -> None:
    job_store = SqliteStore(tmp_path / "jobs.sqlite")
    with pytest.raises(BadRequest, match="job_callback_hosts is empty"):
        CallbackSender(job_store, AllowList([]), []).check("http://a.example/")
    with pytest.raises(SettingError, match="job_callback_secret"):
        Jobs(Settings(job_callback_hosts=["a.example"]), job_store, None)  # type: ignore[arg-type]
