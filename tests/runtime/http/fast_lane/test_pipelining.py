"""Clients that pipeline requests: memory use, answer order, and fairness in the event loop."""

from __future__ import annotations

import asyncio
import select
import socket
from contextlib import ExitStack
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from uvicorn.server import ServerState

from tests.kit.connections import connect_raw
from tests.kit.transports import READ_BYTES, FakeTransport
from tests.runtime.conftest import TALKER
from tests.support.apps import bare_context
from tests.support.batches import BATCH
from tests.support.clients.rawhttp import chunked, request
from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, serving
from tsx_runtime.api.messages import HEADER_NAMES
from tsx_runtime.api.urls import Target
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.fast_lane.cased_protocol import CasedProtocol
from tsx_runtime.http.fast_lane.connection import (
    CALLBACKS_PER_TURN,
    HEAD_END,
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    FastLane,
)
from tsx_runtime.http.fast_lane.heads import Head
from tsx_runtime.http.fast_lane.read_flow import MAX_AHEAD_BYTES
from tsx_runtime.http.lanes import make_lane
from tsx_runtime.settings.schema import Settings

pytestmark = pytest.mark.anyio
PREDICT = request(target=b"/predictions/talker", body=b"0123456789")
LIVEZ = request(b"GET", b"/livez")


class Model:
    """A model whose requests wait until the test answers them."""

    name = "talker"
    client_timeout = 0.0

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.submitted = 0

    def submit(self, job: Any) -> None:
        self.jobs.append(job)
        self.submitted += 1


def connect(
    data: bytes, app: ServerApp | None = None, protocol: Any = FastLane
) -> tuple[Any, FakeTransport]:
    """Return a connection of an app, by default an echo app, and its client's transport."""
    config = uvicorn.Config(app or EchoApp(), ws="none", lifespan="off", log_config=None)
    config.load()
    connection = protocol(config, ServerState(), {})
    transport = FakeTransport(data)
    connection.connection_made(transport)
    return connection, transport


def connect_model(data: bytes) -> tuple[FastLane, FakeTransport, Model]:
    """Return a connection whose requests reach a model, its transport, and the model."""
    connection, transport = connect(data)
    model = Model()
    head = Head(Target("talker", None), b"", 10, True, 0, None, False, "", [], None, None)
    known_heads = {PREDICT[:-10]: (head, model)}
    connection.lane.heads = SimpleNamespace(
        entries=known_heads, look_up=known_heads.get, read=lambda raw: None
    )
    return connection, transport, model


@pytest.mark.slow
async def test_reading_a_pipelining_client_pauses_at_a_memory_limit():
    connection, transport, model = connect_model(PREDICT * 20_000)  # 1.6 MB
    max_ahead_bytes = 0
    while model.submitted < 20_000:
        while transport.deliver(connection):
            max_ahead_bytes = max(max_ahead_bytes, len(connection._ahead))
        await asyncio.sleep(0)
        assert len(model.jobs) <= 1  # The order of answers requires one at a time.
        for job in model.jobs:
            job.answer(200, b"", b"ok", BATCH)
        model.jobs.clear()
    assert max_ahead_bytes <= MAX_AHEAD_BYTES + 2 * READ_BYTES
    assert transport.pauses.count(False) <= len(transport.data) // READ_BYTES + 2
    assert transport.written.count(b"200 OK") == 20_000


async def test_a_large_body_is_read_in_pieces_over_several_iterations():
    body = bytes(10 * READ_BYTES)
    head = PREDICT[:-10].replace(b"Content-Length: 10", b"Content-Length: %d" % len(body))
    connection, transport, model = connect_model(head + body)
    large_head = Head(
        Target("talker", None), b"", len(body), True, 0, None, False, "", [], None, None
    )
    connection.lane.heads.entries[head] = (large_head, model)
    connection.lane.heads.find_again = lambda head: model
    iterations = 0
    while not model.submitted:
        assert transport.deliver(connection)
        while transport.paused and not model.submitted:
            await asyncio.sleep(0)
            iterations += 1
    assert iterations >= 9
    assert b"".join(model.jobs[0].body.pieces) == body


class EchoApp(ServerApp):
    """An app that answers with the request's path and body length, and records the scopes."""

    def __init__(self) -> None:
        super().__init__(bare_context(Settings()))
        self.lane_of = cache(partial(make_lane, self))
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        size, message = 0, {"type": "http.request", "more_body": True}
        while message["type"] == "http.request" and message["more_body"]:
            message = await receive()
            size += len(message.get("body", b""))
        answer = b"%b %d" % (scope["path"].encode(), size)
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


CHUNKED = b"POST /sum HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
AHEAD_OF_UVICORN = {
    "many small requests": (LIVEZ * 2000, [b"/livez 0"] * 2000),
    "chunked bodies full of what ends a head": (
        (CHUNKED + chunked([HEAD_END * 500]) + LIVEZ * 30) * 20,
        ([b"/sum 2000"] + [b"/livez 0"] * 30) * 20,
    ),
    "empty lines between requests": (
        b"\r\n\r\n" * 40_000 + LIVEZ + b"\r\n" * 40_000 + LIVEZ,
        [b"/livez 0"] * 2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("data", "answers"), AHEAD_OF_UVICORN.values(), ids=AHEAD_OF_UVICORN)
async def test_uvicorn_gets_pipelined_requests_one_at_a_time(data, answers):
    connection, transport = connect(data)
    max_queued = iterations = 0
    while transport.written.count(b"HTTP/1.1 200") < len(answers):
        transport.deliver(connection)
        max_queued = max(max_queued, len(connection.pipeline))
        assert len(connection._ahead) <= MAX_AHEAD_BYTES + 2 * READ_BYTES
        await asyncio.sleep(0)
        iterations += 1
        assert iterations < 100 * len(answers) + 1000
    lines = [
        response.rpartition(b"\r\n\r\n")[2]
        for response in bytes(transport.written).split(b"HTTP/1.1 200 OK")[1:]
    ]
    assert lines == answers
    assert max_queued <= MIN_PIECE_BYTES // len(LIVEZ) + 2


async def test_one_loop_iteration_parses_a_bounded_number_of_chunks():
    chunks, size = 100_000, 1
    connection, transport = connect(CHUNKED + chunked([bytes(size)] * chunks) + LIVEZ)
    iterations = 0
    while transport.written.count(b"HTTP/1.1 200") < 2:
        filled = connection._received_bytes
        transport.deliver(connection)
        assert (
            connection._received_bytes - filled
            <= (CALLBACKS_PER_TURN + MAX_PIECE_BYTES / size + 1) * size
        )
        await asyncio.sleep(0)
        iterations += 1
    assert iterations > chunks / (CALLBACKS_PER_TURN + MAX_PIECE_BYTES / size) / 2
    assert b"/sum %d" % (chunks * size) in transport.written


EXCESSIVE_FRAMING = {
    "small chunks with extensions": b"1;abcdefgh\r\nx\r\n" * 50_000,
    "a long extension": b"1;" + b"x" * 200_000,
    "trailers": b"1\r\nx\r\n0\r\n" + b"a:b\r\n" * 50_000,
    "a long trailer": b"1\r\nx\r\n0\r\na: " + b"x" * 200_000,
}


@pytest.mark.parametrize("body", EXCESSIVE_FRAMING.values(), ids=EXCESSIVE_FRAMING)
async def test_a_chunked_body_with_excessive_framing_is_refused(body):
    connection, transport = connect(CHUNKED + body)
    while not transport.is_closing():
        transport.deliver(connection)
        await asyncio.sleep(0)
    assert transport.written.startswith(b"HTTP/1.1 431 ")
    assert b"max_header_size" in transport.written
    assert len(connection.headers) == 1


async def test_a_chunked_body_after_a_large_one_does_not_count_as_framing():
    # Some of these requests begin in the piece in which the previous one ends.
    sizes = range(200_000, 200_000 + 20 * (MIN_PIECE_BYTES // 2), MIN_PIECE_BYTES // 2)
    data = b"".join(CHUNKED + chunked([bytes(size)]) for size in sizes)
    connection, transport = connect(data)
    while transport.written.count(b"HTTP/1.1 ") < len(sizes) and not transport.is_closing():
        transport.deliver(connection)
        await asyncio.sleep(0)
    assert transport.written.count(b"HTTP/1.1 200") == len(sizes)


async def test_no_answer_is_written_after_garbage_closed_the_connection():
    connection, transport = connect(CHUNKED + chunked([b"x"]) + b"no HTTP" + HEAD_END)
    transport.deliver(connection)
    assert transport.is_closing()
    written_before = bytes(transport.written)
    for _ in range(10):
        await asyncio.sleep(0)
    assert transport.written == written_before


@pytest.mark.parametrize("protocol", [FastLane, CasedProtocol])
async def test_trailers_do_not_become_headers_of_their_request(protocol):
    app = EchoApp()
    data = CHUNKED + chunked([b"x"], trailer=b"Authorization: Bearer x\r\n")
    connection, transport = connect(data, app, protocol)
    while b"/sum 1" not in transport.written:
        transport.deliver(connection)
        await asyncio.sleep(0)
    (scope,) = app.scopes
    assert [name for name, _ in scope["headers"]] == [b"transfer-encoding"]
    assert scope[HEADER_NAMES] == [b"Transfer-Encoding"]


async def test_too_many_headers_are_refused_before_parsing():
    app = EchoApp()
    head = b"GET /livez HTTP/1.1\r\n" + b"a:\r\n" * 10_000 + b"\r\n"
    connection, transport = connect(head, app)
    transport.deliver(connection)
    assert transport.written.startswith(b"HTTP/1.1 431 ")
    assert b"10000 headers; the limit is 200" in transport.written
    assert transport.is_closing()
    assert connection.headers is None  # uvicorn's parser never received them
    assert not app.scopes


class TalkingApp(ServerApp):
    """An app that accepts a WebSocket and reads its messages once the test sets `may_read`."""

    def __init__(self) -> None:
        super().__init__(bare_context(Settings()))
        self.lane_of = cache(partial(make_lane, self))
        self.may_read = asyncio.Event()
        self.read_count = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        await self.may_read.wait()
        while (await receive())["type"] == "websocket.receive":
            self.read_count += 1


async def test_a_websocket_is_not_read_while_early_messages_wait():
    head = b"GET /predictions/talker HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    head += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    message = b"\x82\xfe\x03\xe8" + bytes(4 + 1000)
    app, count = TalkingApp(), 3 * READ_BYTES // len(message)
    connection, transport = connect(head + message * count, app)
    connection.lane.max_message_size = 1 << 20
    for _ in range(20):
        transport.deliver(transport.protocol or connection)
        await asyncio.sleep(0)
    assert transport.protocol is not None
    assert transport.paused
    assert transport.sent == READ_BYTES
    app.may_read.set()
    iterations = 0
    while app.read_count < count:
        transport.deliver(transport.protocol)
        await asyncio.sleep(0)
        iterations += 1
        assert iterations < 10 * count
    transport.protocol.connection_lost(None)
    assert app.context.bytes_in_flight.used == 0


@pytest.mark.parametrize("size", [1, 7, 100, 5000])
def test_answers_of_both_lanes_keep_the_order_of_their_requests(server, size):
    request_list, expected = [], []
    for number in range(60):
        body = b"%d " % number * (1 + number % 5)
        do = (b"x-do", b"bytes")
        request_list.append(request(target=b"/predictions/talker", headers=[do], body=body))
        request_list.append(
            request(target=b"/predictions/talker", headers=[do, (b"Transfer-Encoding", b"chunked")])
            + chunked([body, b"."])
        )
        request_list.append(request(b"GET", b"/ping" if number % 3 else b"/livez"))
        expected += [body, body + b"."]
    data = b"".join(request_list)
    if size == 1:
        data = b"".join(request_list[:9])
    with connect_raw(server) as connection:
        connection.send(*(data[start : start + size] for start in range(0, len(data), size)))
        answers = [connection.answer() for _ in range(9 if size == 1 else len(request_list))]
    assert all(answer and answer.status == 200 for answer in answers)
    bodies = [answer.body for start, answer in enumerate(answers) if answer and start % 3 != 2]
    assert bodies == expected[: len(bodies)]


@pytest.mark.usefixtures("processes")
def test_forty_pipelining_clients_neither_grow_nor_stall_the_server(tmp_path):
    """Pipeline as many requests as once took hundreds of megabytes and blocked the loop."""
    archive = make_model(tmp_path / "talker.mar", TALKER)
    environment = {
        "TSX_CACHE_DIR": str(tmp_path / "cache"),
        "TSX_STATE_DIR": str(tmp_path / "state"),
    }
    with serving(["serve", archive, *FREE_PORTS], tmp_path, environment) as server_process:
        address = server_process.address("predictions")
        url, process = httpx.URL(address), psutil.Process(server_process.process.pid)
        with httpx.Client(base_url=address, timeout=60) as other_client, ExitStack() as stack:
            assert other_client.get("/livez").status_code == 200
            memory_before = process.memory_info().rss
            clients = [
                stack.enter_context(socket.create_connection((url.host, url.port)))
                for _ in range(40)
            ]
            data, sent_counts, answered_count = LIVEZ * 100_000, dict.fromkeys(clients, 0), 0
            for client in clients:
                client.setblocking(False)
            for _ in range(10):
                for client in select.select([], clients, [], 0)[1]:
                    sent_counts[client] += client.send(memoryview(data)[sent_counts[client] :])
                for client in select.select(clients, [], [], 0)[0]:
                    answered_count += client.recv(1 << 20).count(b"200 OK")
                assert other_client.post("/predictions/talker", content=b"x").status_code == 200
                assert process.memory_info().rss - memory_before < 60 << 20
            assert answered_count
