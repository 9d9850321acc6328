"""`Idempotency-Key`: one run for each key, whose answer is stored before it is sent."""

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
from tsx_runtime.core.isolation.hidden_credentials import HiddenHeaders
from tsx_runtime.errors import StoreUnavailable
from tsx_runtime.http.asgi_lane.idempotency import Idempotency, has_key, keyed_request
from tsx_runtime.jobs import keyed_runs
from tsx_runtime.jobs.keyed_runs import KeyedRuns
from tsx_runtime.jobs.sqlite import SqliteStore
from tsx_runtime.jobs.store import AnswerKey, StoredAnswer
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings

pytestmark = pytest.mark.anyio
KEY: Pair = (b"idempotency-key", b'"k-1"')
DAY = 86_400.0


class Model:
    """An app that answers with the number of the run once `may` is set."""

    def __init__(self) -> None:
        self.status, self.parts, self.runs = 200, 1, 0
        self.begun = asyncio.Event()
        self.may = asyncio.Event()
        self.may.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == scope["wanted"]
        self.runs += 1
        self.begun.set()
        await self.may.wait()
        body = b"run %d " % self.runs
        length = [] if self.parts > 1 else [(b"content-length", b"%d" % len(body))]
        headers = [
            (b"x-request-id", b"id-%d" % self.runs),
            (b"content-type", b"text/plain"),
            *length,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for remaining in reversed(range(self.parts)):
            await send({"type": "http.response.body", "body": body, "more_body": remaining > 0})


class Client:
    """A server and its clients."""

    def __init__(
        self,
        store: SqliteStore,
        owner: str = "one",
        max_size: int = 1000,
        credentials: Collection[bytes] = (),
    ) -> None:
        self.runs = KeyedRuns(store, owner, DAY, max_size, store.open)
        self.lane = Idempotency(self.runs, 1000, 1000, None, ResponseCounts(), credentials)

    async def ask(
        self,
        model: Callable[[Scope, Receive, Send], Awaitable[None]],
        body: bytes = b"x",
        *headers: Pair,
        path: str = "/predictions/m",
        leaves: asyncio.Event | None = None,
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Send a request, and return the status, headers and body of its answer."""
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [*(headers or (KEY,))],
            "wanted": body,
        }
        sent: list[Message] = []
        received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if received:
                return received.pop()
            await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await self.lane(model, scope, receive, send)
        if not sent:
            return 0, {}, b""
        return (
            sent[0]["status"],
            dict(sent[0]["headers"]),
            b"".join(message["body"] for message in sent[1:]),
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


async def test_a_repeated_request_gets_the_first_answer_also_after_a_restart(
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


async def test_keys_are_apart_by_path_and_token(client, model):
    await client.ask(model)
    assert (await client.ask(model, b"x", path="/predictions/other"))[2] == b"run 2 "
    assert (await client.ask(model, b"x", KEY, (b"authorization", b"Bearer b")))[2] == b"run 3 "


@pytest.mark.parametrize(
    "name", [b"cookie", b"proxy-authorization", b"x-api-key", b"x-forwarded-user"]
)
async def test_keys_are_apart_by_each_credential_that_a_handler_sees(store, model, name):
    settings = Settings(models={"llama": {"pass_headers": ["cookie", "proxy-authorization"]}})
    client = Client(store, credentials=HiddenHeaders(settings).exposed_credential_headers)
    asked = [
        [(name, b"alice")],
        [(name, b"bob")],
        [(name, b"alice"), (name, b"bob")],
        [(name, b"alice")],
    ]
    bodies = [(await client.ask(model, b"x", KEY, *headers))[2] for headers in asked]
    assert bodies == [b"run 1 ", b"run 2 ", b"run 3 ", b"run 1 "]


async def test_a_credential_that_no_handler_sees_belongs_to_no_key(store, model):
    client = Client(store, credentials=HiddenHeaders(Settings()).exposed_credential_headers)
    await client.ask(model, b"x", KEY, (b"cookie", b"balancer=1"))
    assert (await client.ask(model, b"x", KEY, (b"cookie", b"balancer=2")))[2] == b"run 1 "


async def test_an_answer_that_another_address_has_stored_is_replayed_confined(client, model):
    assert b"content-security-policy" not in (await client.ask(model))[1]
    client.lane.confined = True
    replayed = (await client.ask(model))[1]
    assert replayed[b"idempotent-replayed"] == b"true"
    assert replayed[b"content-security-policy"].startswith(b"sandbox")


async def test_a_key_of_another_body_is_refused_while_the_first_runs_and_afterwards(client, model):
    model.may.clear()
    first = asyncio.create_task(client.ask(model))
    await model.begun.wait()
    for _ in range(2):
        status, _, body = await client.ask(model, b"y")
        assert status == 422
        assert b"belongs to another request" in body
        model.may.set()
        await first
    assert model.runs == 1


async def test_requests_that_come_while_the_first_runs_wait_for_its_answer(
    client, model, store, monkeypatch
):
    """They may wait on another server of the same store."""
    monkeypatch.setattr(keyed_runs, "MIN_POLL_S", 0.001)
    elsewhere = Client(store, "two")
    model.may.clear()
    first = asyncio.create_task(client.ask(model))
    await model.begun.wait()
    waiting = [asyncio.create_task(server.ask(model)) for server in (client, elsewhere) * 2]
    leaves = asyncio.Event()
    leaving = asyncio.create_task(elsewhere.ask(model, leaves=leaves))
    leaves.set()
    assert (await leaving)[0] == 0  # a client that leaves ends its own wait alone
    model.may.set()
    assert {answer[2] for answer in await asyncio.gather(first, *waiting)} == {b"run 1 "}
    assert model.runs == 1


@pytest.mark.parametrize("status", [500, 503, 429, 404])
async def test_an_answer_that_a_retry_may_improve_is_not_stored(client, model, status):
    model.status = status
    assert (await client.ask(model))[0] == status
    model.status = 200
    assert (await client.ask(model))[2] == b"run 2 "


async def test_a_run_that_fails_or_breaks_off_frees_its_key(client, model):
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise StoreUnavailable("not now")

    async def breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})

    assert (await client.ask(fails))[0] == 503
    assert (await client.ask(breaks_off))[2] == b"a"
    assert (await client.ask(model))[2] == b"run 1 "


async def test_a_stream_goes_out_in_parts_and_comes_again_whole(client, model):
    model.parts = 3
    first = await client.ask(model)
    again = await client.ask(model)
    assert first[2] == again[2] == b"run 1 run 1 run 1 "
    assert again[1][b"content-length"] == b"18"


async def test_an_answer_that_is_too_large_is_sent_once_and_not_run_again(store, model):
    client = Client(store, max_size=10)
    model.parts = 3
    assert len((await client.ask(model))[2]) == 18
    status, _, body = await client.ask(model)
    assert status == 409
    assert b"more than 10 bytes" in body
    assert model.runs == 1


async def test_a_client_that_leaves_comes_back_for_the_answer(client, model):
    leaves = asyncio.Event()

    async def watching(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()

        async def receive_body() -> Message:
            return message

        leaves.set()
        done, _ = await asyncio.wait([asyncio.create_task(receive())], timeout=0.01)
        assert not done
        await model(scope, receive_body, send)

    await client.ask(watching, leaves=leaves)
    assert (await client.ask(model))[2] == b"run 1 "
    assert model.runs == 1


async def test_a_server_that_seemed_dead_sends_the_answer_of_the_server_that_took_over(
    client, model, store
):
    model.may.clear()
    first = asyncio.create_task(client.ask(model))
    await model.begun.wait()
    (key,) = client.runs._runs
    await store.renew_answer(key, "one", -1)  # the lease has expired
    model_elsewhere = Model()
    model_elsewhere.runs = 1
    assert (await Client(store, "two").ask(model_elsewhere))[2] == b"run 2 "
    model.may.set()
    assert (await first)[2] == b"run 2 "


async def test_a_client_that_leaves_while_its_key_is_stored_finds_it_free(
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


async def test_a_server_that_died_frees_its_keys_with_its_lease(client, model, store):
    keyed = keyed_request(
        {"method": "POST", "path": "/predictions/m", "query_string": b"", "headers": [KEY]},
        "k-1",
        b"x",
        (),
    )
    assert await store.begin_answer(keyed.key, keyed.fingerprint, "dead", 0.0) is None
    assert (await client.ask(model))[2] == b"run 1 "


async def test_a_run_keeps_its_key_for_as_long_as_it_takes(client, model, store, monkeypatch):
    monkeypatch.setattr(keyed_runs, "LEASE_S", 0.03)
    renewed, renew = asyncio.Event(), store.renew_answer

    async def watched(key: AnswerKey, owner: str, seconds: float) -> None:
        await renew(key, owner, 10 * DAY)
        renewed.set()

    monkeypatch.setattr(store, "renew_answer", watched)
    model.may.clear()
    first = asyncio.create_task(client.ask(model))
    await renewed.wait()
    (key,) = client.runs._runs
    begun = await store.begin_answer(key, "", "two", 1)
    assert begun.expires > time.time() + 9 * DAY
    model.may.set()
    await first


@pytest.mark.parametrize("value", [b"", b'""', b'"a', b"a b", b"\xe9", b"k" * 256])
async def test_an_invalid_key_is_refused_and_nothing_runs(client, model, value):
    status, _, body = await client.ask(model, b"x", (b"idempotency-key", value))
    assert status == 400
    assert b"1 to 255 visible ASCII characters" in body
    assert (await client.ask(model, b"x", KEY, KEY))[0] == 400
    assert model.runs == 0


def test_requests_that_run_nothing_need_no_key():
    assert has_key({"method": "PUT", "headers": [KEY]})
    assert not has_key({"method": "PUT", "headers": [(b"x-idempotency-key", b"k")]})
    assert not has_key({"method": "OPTIONS", "headers": [KEY]})


@pytest.mark.usefixtures("processes")
async def test_a_killed_server_leaves_the_keys_of_its_jobs_and_frees_those_of_its_runs(
    store, tmp_path
):
    program = """
import asyncio, os, signal, sys
from pathlib import Path
from tsx_runtime.jobs.sqlite import SqliteStore
from tsx_runtime.jobs.store import AnswerKey, NewJob, StoredAnswer, StoredRequest

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
