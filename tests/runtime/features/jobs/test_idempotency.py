"""`Idempotency-Key`: one run per key, whose answer is stored before it is sent."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tsx_runtime.api.headers import Pair
from tsx_runtime.api.messages import Message, Receive, Scope, Send
from tsx_runtime.core.hidden_credentials import HiddenHeaders
from tsx_runtime.errors import StoreUnavailable
from tsx_runtime.features.jobs import keyed_runs
from tsx_runtime.features.jobs.http.idempotency import Idempotency, build_keyed_request, has_key
from tsx_runtime.features.jobs.keyed_runs import KeyedRuns
from tsx_runtime.features.jobs.storage.sqlite import SqliteStore
from tsx_runtime.features.jobs.storage.store import AnswerKey, StoredAnswer
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings

pytestmark = pytest.mark.anyio
KEY: Pair = (b"idempotency-key", b'"k-1"')
DAY = 86_400.0


class Model:
    """An app that answers with the number of its run once `may_answer` is set."""

    def __init__(self) -> None:
        self.status, self.part_count, self.runs = 200, 1, 0
        self.has_begun = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == scope["wanted"]
        self.runs += 1
        self.has_begun.set()
        await self.may_answer.wait()
        body = b"run %d " % self.runs
        length = [] if self.part_count > 1 else [(b"content-length", b"%d" % len(body))]
        headers = [
            (b"x-request-id", b"id-%d" % self.runs),
            (b"content-type", b"text/plain"),
            *length,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for remaining in reversed(range(self.part_count)):
            await send({"type": "http.response.body", "body": body, "more_body": remaining > 0})


class Client:
    """A server with its clients."""

    def __init__(
        self,
        store: SqliteStore,
        owner: str = "one",
        max_answer_bytes: int = 1000,
        credentials: Collection[bytes] = (),
    ) -> None:
        self.runs = KeyedRuns(store, owner, DAY, max_answer_bytes, store.open)
        self.lane = Idempotency(self.runs, 1000, 1000, None, ResponseCounts(), credentials)

    async def ask(
        self,
        model: Callable[[Scope, Receive, Send], Awaitable[None]],
        body: bytes = b"x",
        *headers: Pair,
        path: str = "/predictions/m",
        leaves: asyncio.Event | None = None,
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Send a request and return the status, headers and body of its answer."""
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [*(headers or (KEY,))],
            "wanted": body,
        }
        sent_messages: list[Message] = []
        pending_messages: list[Message] = [
            {"type": "http.request", "body": body, "more_body": False}
        ]

        async def receive() -> Message:
            if pending_messages:
                return pending_messages.pop()
            await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent_messages.append(message)

        await self.lane(model, scope, receive, send)
        if not sent_messages:
            return 0, {}, b""
        return (
            sent_messages[0]["status"],
            dict(sent_messages[0]["headers"]),
            b"".join(message["body"] for message in sent_messages[1:]),
        )


@asynccontextmanager
async def open_store(path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path / "jobs.sqlite")
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with open_store(tmp_path) as store:
        yield store


@pytest.fixture
def client(store: SqliteStore) -> Client:
    return Client(store)


@pytest.fixture
def model() -> Model:
    return Model()


async def test_a_repeated_request_gets_the_first_answer_even_after_a_restart(
    client, model, store, tmp_path
):
    model.status = 400
    status, headers, body = await client.ask(model)
    assert (status, body) == (400, b"run 1 ")
    assert b"idempotent-replayed" not in headers
    # A key without quotes is the same key.
    assert (await client.ask(model, b"x", (b"idempotency-key", b"k-1")))[2] == b"run 1 "
    await store.close()
    async with open_store(tmp_path) as restarted:
        client, model = Client(restarted, "two"), Model()
        assert await client.ask(model) == (
            400,
            {
                b"x-request-id": b"id-1",
                b"content-type": b"text/plain",
                b"content-length": b"6",
                b"idempotent-replayed": b"true",
            },
            b"run 1 ",
        )
        assert model.runs == 0
        assert client.runs.counts == {"replayed": 1}


async def test_keys_are_separate_per_path_and_token(client, model):
    await client.ask(model)
    assert (await client.ask(model, b"x", path="/predictions/other"))[2] == b"run 2 "
    assert (await client.ask(model, b"x", KEY, (b"authorization", b"Bearer b")))[2] == b"run 3 "


@pytest.mark.parametrize(
    "name", [b"cookie", b"proxy-authorization", b"x-api-key", b"x-forwarded-user"]
)
async def test_keys_are_separate_per_credential_that_a_handler_sees(store, model, name):
    settings = Settings(models={"llama": {"pass_headers": ["cookie", "proxy-authorization"]}})
    client = Client(store, credentials=HiddenHeaders(settings).exposed_credential_headers)
    credential_lists = [
        [(name, b"alice")],
        [(name, b"bob")],
        [(name, b"alice"), (name, b"bob")],
        [(name, b"alice")],
    ]
    bodies = [(await client.ask(model, b"x", KEY, *headers))[2] for headers in credential_lists]
    assert bodies == [b"run 1 ", b"run 2 ", b"run 3 ", b"run 1 "]


async def test_a_hidden_credential_does_not_separate_keys(store, model):
    client = Client(store, credentials=HiddenHeaders(Settings()).exposed_credential_headers)
    await client.ask(model, b"x", KEY, (b"cookie", b"balancer=1"))
    assert (await client.ask(model, b"x", KEY, (b"cookie", b"balancer=2")))[2] == b"run 1 "


async def test_a_replayed_answer_is_confined_if_the_address_requires_it(client, model):
    assert b"content-security-policy" not in (await client.ask(model))[1]
    client.lane.is_confined = True
    replayed = (await client.ask(model))[1]
    assert replayed[b"idempotent-replayed"] == b"true"
    assert replayed[b"content-security-policy"].startswith(b"sandbox")


async def test_reusing_a_key_with_another_body_is_refused(client, model):
    model.may_answer.clear()
    first = asyncio.create_task(client.ask(model))
    await model.has_begun.wait()
    for _ in range(2):
        status, _, body = await client.ask(model, b"y")
        assert status == 422
        assert b"belongs to another request" in body
        model.may_answer.set()
        await first
    assert model.runs == 1


async def test_concurrent_requests_wait_for_the_first_answer(client, model, store, monkeypatch):
    """Let some of them wait on another server with the same store."""
    monkeypatch.setattr(keyed_runs, "MIN_POLL_S", 0.001)
    other_server = Client(store, "two")
    model.may_answer.clear()
    first = asyncio.create_task(client.ask(model))
    await model.has_begun.wait()
    waiting_requests = [
        asyncio.create_task(server.ask(model)) for server in (client, other_server) * 2
    ]
    leaves = asyncio.Event()
    leaving_request = asyncio.create_task(other_server.ask(model, leaves=leaves))
    leaves.set()
    assert (await leaving_request)[0] == 0  # A client that leaves ends only its own wait.
    model.may_answer.set()
    assert {answer[2] for answer in await asyncio.gather(first, *waiting_requests)} == {b"run 1 "}
    assert model.runs == 1


@pytest.mark.parametrize("status", [500, 503, 429, 404])
async def test_a_retryable_answer_is_not_stored(client, model, status):
    model.status = status
    assert (await client.ask(model))[0] == status
    model.status = 200
    assert (await client.ask(model))[2] == b"run 2 "


async def test_a_failed_or_incomplete_run_frees_its_key(client, model):
    async def raise_error(scope: Scope, receive: Receive, send: Send) -> None:
        raise StoreUnavailable("not now")

    async def breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})

    assert (await client.ask(raise_error))[0] == 503
    assert (await client.ask(breaks_off))[2] == b"a"
    assert (await client.ask(model))[2] == b"run 1 "


async def test_a_stream_is_replayed_as_one_body(client, model):
    model.part_count = 3
    first = await client.ask(model)
    replay = await client.ask(model)
    assert first[2] == replay[2] == b"run 1 run 1 run 1 "
    assert replay[1][b"content-length"] == b"18"


async def test_a_too_large_answer_is_sent_once_but_not_replayed(store, model):
    client = Client(store, max_answer_bytes=10)
    model.part_count = 3
    assert len((await client.ask(model))[2]) == 18
    status, _, body = await client.ask(model)
    assert status == 409
    assert b"more than 10 bytes" in body
    assert model.runs == 1


async def test_a_client_that_left_can_fetch_the_answer_later(client, model):
    leaves = asyncio.Event()

    async def watch_client(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()

        async def receive_body() -> Message:
            return message

        leaves.set()
        done_tasks, _ = await asyncio.wait([asyncio.create_task(receive())], timeout=0.01)
        assert not done_tasks
        await model(scope, receive_body, send)

    await client.ask(watch_client, leaves=leaves)
    assert (await client.ask(model))[2] == b"run 1 "
    assert model.runs == 1


async def test_a_slow_server_sends_the_answer_of_the_server_that_took_over(client, model, store):
    model.may_answer.clear()
    first = asyncio.create_task(client.ask(model))
    await model.has_begun.wait()
    (key,) = client.runs._runs
    await store.renew_answer(key, "one", -1)  # the lease has expired
    other_model = Model()
    other_model.runs = 1
    assert (await Client(store, "two").ask(other_model))[2] == b"run 2 "
    model.may_answer.set()
    assert (await first)[2] == b"run 2 "


async def test_a_client_that_leaves_during_key_storage_frees_the_key(
    client, model, store, monkeypatch
):
    leaves, begin = asyncio.Event(), store.begin_answer

    async def begin_for_ever(*arguments: Any) -> None:
        await begin(*arguments)
        leaves.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "begin_answer", begin_for_ever)
    assert (await client.ask(model, leaves=leaves))[0] == 0
    monkeypatch.setattr(store, "begin_answer", begin)
    assert (await client.ask(model))[2] == b"run 1 "
    assert client.runs.counts == {"run": 1}


async def test_the_keys_of_a_dead_server_are_freed_with_its_lease(client, model, store):
    keyed = build_keyed_request(
        {"method": "POST", "path": "/predictions/m", "query_string": b"", "headers": [KEY]},
        "k-1",
        b"x",
        (),
    )
    assert await store.begin_answer(keyed.key, keyed.fingerprint, "dead", 0.0) is None
    assert (await client.ask(model))[2] == b"run 1 "


async def test_a_long_run_renews_the_lease_of_its_key(client, model, store, monkeypatch):
    monkeypatch.setattr(keyed_runs, "LEASE_S", 0.03)
    renewed, renew = asyncio.Event(), store.renew_answer

    async def record_renewal(key: AnswerKey, owner: str, seconds: float) -> None:
        await renew(key, owner, 10 * DAY)
        renewed.set()

    monkeypatch.setattr(store, "renew_answer", record_renewal)
    model.may_answer.clear()
    first = asyncio.create_task(client.ask(model))
    await renewed.wait()
    (key,) = client.runs._runs
    existing_answer = await store.begin_answer(key, "", "two", 1)
    assert existing_answer.expires > time.time() + 9 * DAY
    model.may_answer.set()
    await first


@pytest.mark.parametrize("value", [b"", b'""', b'"a', b"a b", b"\xe9", b"k" * 256])
async def test_an_invalid_key_is_refused_without_a_run(client, model, value):
    status, _, body = await client.ask(model, b"x", (b"idempotency-key", value))
    assert status == 400
    assert b"1 to 255 visible ASCII characters" in body
    assert (await client.ask(model, b"x", KEY, KEY))[0] == 400
    assert model.runs == 0


def test_requests_that_run_no_model_ignore_the_key():
    assert has_key({"method": "PUT", "headers": [KEY]})
    assert not has_key({"method": "PUT", "headers": [(b"x-idempotency-key", b"k")]})
    assert not has_key({"method": "OPTIONS", "headers": [KEY]})


@pytest.mark.usefixtures("processes")
async def test_a_killed_server_keeps_job_keys_and_frees_run_keys(store, tmp_path):
    program = """
import asyncio, os, signal, sys
from pathlib import Path
from tsx_runtime.features.jobs.storage.sqlite import SqliteStore
from tsx_runtime.features.jobs.storage.store import AnswerKey, NewJob, StoredAnswer, StoredRequest

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.begin_answer(AnswerKey("idempotency", "", "ran"), "f", "killed", 10)
    await store.begin_answer(AnswerKey("idempotency", "", "job"), "f", "killed", 10)
    job = NewJob("id", "m", "", StoredRequest("r", "POST", "/predictions/m", b"", b"", b"x"))
    await store.add(job, 10, 0, (AnswerKey("idempotency", "", "job"), StoredAnswer(202, b"", b"id", "f", 1e12)), "killed")
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    killed = forked.run([sys.executable, "-c", program, str(tmp_path / "jobs.sqlite")], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert await store.begin_answer(AnswerKey("idempotency", "", "ran"), "f", "next", 10) is None
    assert await store.begin_answer(
        AnswerKey("idempotency", "", "job"), "f", "next", 10
    ) == StoredAnswer(202, b"", b"id", "f", 1e12)
    assert await store.counts() == {("m", "queued"): 1}
