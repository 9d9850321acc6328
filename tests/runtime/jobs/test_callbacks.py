"""Callbacks: where they may go, and when they are sent again."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from tests.runtime.jobs.test_store import ANSWER, MOST, new
from tsx_runtime.errors import BadRequest, SettingError
from tsx_runtime.jobs import callbacks, receivers
from tsx_runtime.jobs.callbacks import CallbackSender, backoff, signature
from tsx_runtime.jobs.service import Jobs
from tsx_runtime.jobs.sqlite import SqliteStore
from tsx_runtime.jobs.store import DueCallback
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources.urls import AllowList

pytestmark = pytest.mark.anyio


class WatchedStore(SqliteStore):
    """Puts the end of each try into `ends`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.ends: asyncio.Queue[tuple[float | None, str]] = asyncio.Queue()

    async def end_callback(self, id: str, retry_in: float | None, error: str) -> None:
        await super().end_callback(id, retry_in, error)
        self.ends.put_nowait((retry_in, error))


async def finished(store: SqliteStore, url: str, id: str = "a") -> None:
    await store.add(new(id, callback=url), MOST)
    await store.claim({("m", ""): 1}, "me", 60)
    await store.finish(id, 1, "me", ANSWER, 60)


async def ended(path: Path, hosts: list[str], url: str, id: str = "a") -> tuple[float | None, str]:
    store = WatchedStore(path / "jobs.sqlite")
    await finished(store, url, id)
    task = asyncio.create_task(
        CallbackSender(store, AllowList(hosts), ["secret"], lambda: 0.5).run()
    )
    try:
        return await asyncio.wait_for(store.ends.get(), 30)
    finally:
        task.cancel()
        await store.close()


async def test_a_pattern_opens_no_private_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tsx.jobs"):
        retry_in, error = await ended(tmp_path, ["http://.*"], "http://localhost:9/?token=secret")
    assert retry_in == 2.0
    assert "not public" in error
    assert "secret" not in caplog.text


async def test_a_host_that_is_allowed_no_more_gets_nothing(tmp_path: Path) -> None:
    assert (await ended(tmp_path, ["a.example"], "http://b.example/"))[
        1
    ] == "job_callback_hosts does not allow it any more"


async def test_a_refused_connection_is_tried_again(tmp_path: Path) -> None:
    assert (await ended(tmp_path, ["localhost:9"], "http://localhost:9/"))[0] == 2.0


async def test_a_sender_that_ends_leaves_what_it_was_sending_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may = threading.Event(), threading.Event()

    def post(self: CallbackSender, due: DueCallback) -> int:
        begun.set()
        may.wait(30)
        return 200

    monkeypatch.setattr(CallbackSender, "_post", post)
    store = WatchedStore(tmp_path / "jobs.sqlite")
    await finished(store, "http://a.example/")
    sending = asyncio.create_task(CallbackSender(store, AllowList(["a.example"]), ["secret"]).run())
    await asyncio.to_thread(begun.wait, 30)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await store.close()
    may.set()
    await asyncio.sleep(0)
    assert store.ends.empty()
    assert store._thread is None


async def test_a_callback_that_fails_unexpectedly_is_tried_again_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post(self: CallbackSender, due: DueCallback) -> int:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(CallbackSender, "_post", post)
    assert await ended(tmp_path, ["a.example"], "http://a.example/") == (
        2.0,
        "RuntimeError: unexpected",
    )
    monkeypatch.setattr(callbacks, "MOST_TRIES", 1)
    assert await ended(tmp_path, ["a.example"], "http://a.example/", "b") == (
        None,
        "RuntimeError: unexpected",
    )


async def test_a_receiver_that_does_not_answer_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may, hung = threading.Event(), []

    def post(self: CallbackSender, due: DueCallback) -> int:
        if due.url.startswith("http://dead.example/"):
            hung.append(due.id)
            may.wait(30)
        return 200

    monkeypatch.setattr(CallbackSender, "_post", post)
    store = WatchedStore(tmp_path / "jobs.sqlite")
    for number in range(callbacks.AT_ONCE + 1):
        await finished(store, "http://dead.example/", f"dead-{number}")
    await finished(store, "http://well.example/", "well")
    sending = asyncio.create_task(CallbackSender(store, AllowList([]), ["secret"]).run())
    try:
        assert await asyncio.wait_for(store.ends.get(), 25) == (None, "")  # while the others hang
        assert len(hung) == receivers.AT_ONCE
        may.set()
        for _ in range(callbacks.AT_ONCE + 1):  # they come after each other
            assert await asyncio.wait_for(store.ends.get(), 30) == (None, "")
    finally:
        may.set()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await store.close()


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("HTTPS://A.Example/Done?x=1", "https://a.example/Done?x=1"),
        ("https://a.example:0443?x=1", "https://a.example:443/?x=1"),
        ("https://[2001:DB8::1]:443/", "https://[2001:db8::1]:443/"),
    ],
)
def test_a_receiver_has_one_name(tmp_path: Path, url: str, stored: str) -> None:
    sender = CallbackSender(
        SqliteStore(tmp_path / "jobs.sqlite"), AllowList(["https://.*"]), ["secret"]
    )
    assert sender.check(url) == stored
    assert stored.startswith(receivers.receiver_of(stored))


def test_a_callback_is_signed_with_the_new_secret_and_with_the_old_one(tmp_path: Path) -> None:
    settings = Settings(
        job_callback_hosts=["a.example"],
        job_callback_secret="n" * 16,
        job_callback_old_secret="o" * 16,
    )
    jobs = Jobs(settings, SqliteStore(tmp_path / "jobs.sqlite"), None)  # type: ignore[arg-type]  # nothing runs
    due = DueCallback("a", "http://a.example/", 1, "id", ANSWER)
    seconds, *signatures = jobs.callbacks._headers(due)["x-tsx-signature"].split(",")
    now = int(seconds.removeprefix("t="))
    secrets = (b"n" * 16, b"o" * 16)
    assert signatures == [
        f"v1={signature(secret, now, 'a', ANSWER.status, ANSWER.body)}" for secret in secrets
    ]


def test_pauses_double_up_to_an_hour_and_differ() -> None:
    assert [backoff(attempts, 0.5) for attempts in (1, 2, 3, 20)] == [2.0, 4.0, 8.0, 3600.0]
    assert (backoff(3, 0.0), backoff(3, 1.0)) == (4.0, 12.0)


def test_without_hosts_callbacks_are_refused_and_without_a_secret_the_server_does_not_start(
    tmp_path: Path,
) -> None:
    store = SqliteStore(tmp_path / "jobs.sqlite")
    with pytest.raises(BadRequest, match="job_callback_hosts is empty"):
        CallbackSender(store, AllowList([]), []).check("http://a.example/")
    with pytest.raises(SettingError, match="job_callback_secret"):
        Jobs(Settings(job_callback_hosts=["a.example"]), store, None)  # type: ignore[arg-type]  # nothing runs
