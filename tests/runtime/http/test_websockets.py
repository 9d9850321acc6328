"""WebSockets on the inference address, tested with the client of the package `websockets`."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from uvicorn.server import ServerState
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.kit.connections import connect_raw
from tests.kit.transports import FakeTransport
from tests.runtime.conftest import DEADLINE, RunningServer
from tests.support.certificates import make_certificate
from tsx_archiver import ArchiveSpec
from tsx_runtime.core.scheduling.byte_budget import MAX_UNCOUNTED_BYTES, ByteBudget
from tsx_runtime.http.asgi_lane.websockets import EventParser, _request_scope
from tsx_runtime.http.connection_clock import Timeouts
from tsx_runtime.http.turns import Turns
from tsx_runtime.http.websocket import (
    FRAMES_PER_TURN,
    MAX_FRAGMENTS,
    MAX_IDLE_FRAMES,
    WebSocketConnection,
)
from tsx_runtime.testing import serve

pytestmark = pytest.mark.anyio

# Streams `count` pieces of `size` bytes, counts them in a file, or answers with server-sent events.
PIECES = """
import time
from pathlib import Path
from ts.handler_utils.utils import send_intermediate_predict_response
from unittest.mock import patch


def handle(data, context):
    if data is None:
        return None
    return [stream(index, row["body"], context) for index, row in enumerate(data)]


def stream(index, order, context):
    def send(piece):
        send_intermediate_predict_response([piece], {index: context.get_request_id(index)}, "", 200, context)

    if "events" in order:
        context.set_response_content_type(index, "text/event-stream")
        send('data: {"a": 1}\\n\\ndata: {"b"')
        if order["events"] == "broken":
            raise ValueError("no more")
        send(': 2}\\n\\n')
        return "data: [DONE]\\n\\n"
    for number in range(order["count"]):
        send(bytes(order["size"]))
        time.sleep(order.get("pause", 0))
        Path(order["file"]).write_text(str(number + 1))
    return b"end"
"""


def address(server: RunningServer, path: str = "/predictions/talker") -> str:
    return server.addresses["inference"].replace("http", "ws") + path


def talk(
    server: RunningServer, path: str = "/predictions/talker", **headers: str
) -> ClientConnection:
    header_fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return connect(
        address(server, path),
        additional_headers=header_fields,
        proxy=None,
        subprotocols=["tsx.v1"],
        close_timeout=DEADLINE,
    )


def ask(
    socket: ClientConnection, message: str | bytes = b"x"
) -> tuple[list[bytes], dict[str, Any]]:
    socket.send(message)
    return answer_on(socket)


def answer_on(socket: ClientConnection) -> tuple[list[bytes], dict[str, Any]]:
    """Return the pieces of an answer and its final message."""
    pieces = []
    while isinstance(message := socket.recv(DEADLINE), bytes):
        pieces.append(message)
    return pieces, json.loads(message)


def check_closed(client: ClientConnection, code: int) -> None:
    with pytest.raises(ConnectionClosed) as exc_info:
        client.recv(DEADLINE)
    assert exc_info.value.rcvd.code == code


def test_each_message_is_a_request_answered_in_order(server):
    with talk(server, X_Own="1") as socket:
        assert socket.subprotocol == "tsx.v1"
        for message in (' {"a": [1, 2]}', "[see](this) text", b"\x00\xff"):
            socket.send(message)
        answers = [answer_on(socket) for _ in range(3)]
    rows = [json.loads(pieces[0]) for pieces, _ in answers]
    assert [row["row"]["body"] for row in rows] == [
        {"a": [1, 2]},
        "[see](this) text",
        {"bytes": "\x00\xff"},
    ]
    assert [row["headers"].get("Content-Type") for row in rows] == [
        "application/json",
        "text/plain; charset=utf-8",
        None,
    ]
    assert all(row["headers"]["X-Own"] == "1" for row in rows)
    removed_prefixes = ("sec-", "upgrade", "connection")
    assert not [name for name in rows[0]["headers"] if name.lower().startswith(removed_prefixes)]
    assert [end["request_id"] for _, end in answers] == [row["id"] for row in rows]
    assert {tuple(end) for _, end in answers} == {("done", "status", "request_id", "headers")}
    assert {(end["done"], end["status"]) for _, end in answers} == {(True, 200)}


def test_the_content_type_of_the_handshake_applies_to_all_messages(server):
    with talk(server, "/predictions/talker/1.0/some/path", Content_Type="text/csv") as socket:
        (piece,), _ = ask(socket, '{"a": 1}')
    headers = json.loads(piece)["headers"]
    assert (headers["Content-Type"], headers["url_path"]) == ("text/csv", "some/path")


def test_stream_parts_are_messages_and_the_last_has_the_headers(server):
    with talk(server, x_do="stream") as socket:
        pieces, end = ask(socket)
        assert (pieces, end["status"]) == ([b"a", b"b", b"c"], 200)
    with talk(server, x_do="headers") as socket:
        assert ask(socket)[1]["headers"] == {"content-type": "text/csv", "x-own": "1"}


def test_errors_are_messages_and_the_connection_stays_open(server):
    with talk(server, x_do="raise") as socket:
        for _ in range(2):
            pieces, end = ask(socket)
            assert (pieces, end["status"]) == ([], 500)
            assert end["error"]["type"] == "InternalServerException"
            assert "no such image" in end["error"]["message"]
    with talk(server, x_do="status", x_status="422") as socket:
        assert (ask(socket)[0], ask(socket)[1]["status"]) == ([b"body of it"], 422)
    with talk(server, x_tsx_timeout_ms="never") as socket:
        assert "x-tsx-timeout-ms" in ask(socket)[1]["error"]["message"]


def test_a_stream_whose_worker_dies_ends_with_an_error(empty):
    empty.register("talker.mar", initial_workers=1)
    with talk(empty, x_do="break") as socket:
        pieces, end = ask(socket)
        assert (pieces, end["status"]) == ([b"a"], 500)
        assert end["error"]["type"] == "InternalServerException"


@pytest.mark.parametrize(
    ("path", "status"),
    [("/predictions/none", 404), ("/predictions/talker/9", 404), ("/ping", 404), ("/models", 404)],
)
def test_a_path_without_a_model_is_refused_in_the_handshake(server, path, status):
    with pytest.raises(InvalidStatus) as exc_info:
        talk(server, path)
    answer = exc_info.value.response
    assert answer.status_code == json.loads(answer.body)["code"] == status
    assert answer.headers["x-request-id"]


def test_the_chat_path_reads_the_model_from_the_body(server):
    with talk(server, "/v1/chat/completions") as socket:
        (piece,), _ = ask(socket, '{"model": "talker", "messages": []}')
        assert json.loads(piece)["headers"]["url_path"] == "v1/chat/completions"
        _, end = ask(socket, '{"model": "none", "messages": []}')
    assert (end["status"], end["error"]["code"]) == (404, "model_not_found")


def test_the_management_address_has_no_websocket(server):
    with pytest.raises(InvalidStatus):
        connect(server.addresses["management"].replace("http", "ws") + "/models", proxy=None)


def test_a_message_over_the_limit_closes_the_connection(server):
    with talk(server, x_do="bytes") as socket:
        assert ask(socket, bytes(100_000))[1]["status"] == 200
        socket.send(bytes(100_001))
        check_closed(socket, 1009)


@pytest.fixture(scope="module")
def token_server(start_server: Callable[..., Any]) -> Iterator[RunningServer]:
    """Start a server with short timeouts and a token that a subprotocol must encode."""
    short_timeouts = partial(Timeouts, body_rate=1_000_000_000)
    with (
        patch("tsx_runtime.http.context.Timeouts", short_timeouts),
        start_server(
            inference_token="a/b=",
            max_failed_tokens=1,
            max_request_size=1_000_000,
            max_inflight_bytes=1,
            body_timeout=1,
            write_timeout=1,
        ) as server,
    ):
        server.register("talker.mar", initial_workers=1, batch_size=1)
        yield server


def test_the_token_is_a_header_or_a_subprotocol(token_server):
    with talk(token_server, Authorization="Bearer a/b=") as socket:
        (piece,), end = ask(socket)
        assert end["status"] == 200
    assert "a/b=" not in piece.decode()
    with connect(
        address(token_server), proxy=None, subprotocols=["tsx.v1", "tsx.token.a%2Fb%3D"]
    ) as socket:
        assert socket.subprotocol == "tsx.v1"
        (piece,), end = ask(socket)
        assert end["status"] == 200
    assert "a%2Fb%3D" not in piece.decode()
    statuses = []
    for token in ("wrong", "c/d=", "c/d="):
        with pytest.raises(InvalidStatus) as exc_info:
            talk(token_server, Authorization=f"Bearer {token}")
        statuses.append(exc_info.value.response.status_code)
    assert statuses == [400, 400, 429]


def with_token(server: RunningServer, **headers: str) -> ClientConnection:
    return talk(server, Authorization="Bearer a/b=", **headers)


def test_a_message_over_the_budget_or_too_slow_closes_the_connection(token_server, until):
    bytes_budget = token_server.registry.bytes_in_flight
    with with_token(token_server) as slow_client, with_token(token_server) as refused_client:
        begin(slow_client, 900_000)
        until(lambda: bytes_budget.used > 800_000)
        begin(refused_client, 900_000)
        check_closed(refused_client, 1013)
        check_closed(slow_client, 1008)
    until(lambda: bytes_budget.used == 0)


def begin(client: ClientConnection, size: int) -> None:
    """Send all but the last byte of a binary message."""
    frame = b"\x82\xff" + size.to_bytes(8, "big") + bytes(4) + bytes(size - 1)
    client.socket.sendall(frame)


def test_consecutive_messages_count_against_the_budget_one_by_one(token_server):
    message, count = bytes(60_000), 60  # together more than the budget
    with with_token(token_server, x_do="bytes") as socket:
        sender = threading.Thread(target=lambda: [socket.send(message) for _ in range(count)])
        sender.start()
        for _ in range(count):
            assert answer_on(socket)[1]["status"] == 200
        sender.join(DEADLINE)


def test_unread_answers_are_freed_when_their_client_leaves(token_server, until):
    bytes_budget = token_server.registry.bytes_in_flight
    # The server closes a connection whose client reads nothing for write_timeout.
    with suppress(ConnectionClosed), with_token(token_server, x_do="bytes") as client:
        while not bytes_budget.unread:
            client.send(bytes(900_000))
        client.socket.close()
    until(lambda: bytes_budget.used == 0)


def test_the_waiting_request_of_a_client_that_leaves_is_dropped(token_server, tmp_path, until):
    gate = tmp_path / "open"
    version = token_server.registry.find("talker")
    with with_token(token_server, x_do="stream-wait", x_file=str(gate)) as busy_client:
        busy_client.send(b"x")
        assert busy_client.recv(DEADLINE) == b"a"
        left_before = version.stats.refusals["ClientLeft"]
        # A request with a deadline waits in the queue instead of being sent ahead to the worker.
        with with_token(token_server, x_do="bytes", x_tsx_timeout_ms="600000") as waiting_client:
            requests_before = version.stats.requests
            for _ in range(3):
                waiting_client.send(b"x")
            until(lambda: version.stats.requests == requests_before + 1)
        until(lambda: version.stats.refusals["ClientLeft"] == left_before + 1)
        gate.touch()
        assert answer_on(busy_client)[0] == [b"b"]


def test_client_limits_count_messages(start_server):
    with start_server(max_requests_per_client=2) as server:
        server.register("talker.mar", initial_workers=1)
        with talk(server, x_do="bytes") as socket:
            for _ in range(2):  # The handshake also counts as a request.
                socket.send(b"x")
            first, second = (answer_on(socket)[1] for _ in range(2))
    assert (first["status"], second["status"], second["headers"]["retry-after"]) == (200, 429, "1")
    assert second["error"]["type"] == "TooManyRequestsException"


def test_a_websocket_counts_as_a_connection_until_it_ends(start_server, until):
    with start_server(max_connections_per_client=1) as server:
        server.register("talker.mar", initial_workers=1)

        def is_free() -> bool:
            try:
                return httpx.get(f"{server.addresses['inference']}/ping").status_code == 200
            except httpx.HTTPError:
                # The server closes before it reads the request, so its answer may be lost.
                return False

        with talk(server) as socket:
            assert ask(socket)[1]["status"] == 200
            assert not is_free()
        until(is_free)


@pytest.fixture(scope="module")
def streaming(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("pieces")
    (directory / "pieces.py").write_text(PIECES)
    pair = make_certificate(directory)
    settings = {
        "inference_address": "https://127.0.0.1:0",
        "certificate_file": pair.certificate,
        "private_key_file": pair.key,
    }
    with serve(
        ArchiveSpec("pieces", str(directory / "pieces.py")),
        worker_preload=False,
        write_timeout=60,
        **settings,
    ) as server:
        yield server.url.replace("http", "ws") + "/predictions/pieces"


@contextmanager
def over_tls(url: str) -> Iterator[Any]:
    """Connect with the asynchronous client, wrapped in the methods of the synchronous one.

    The synchronous client uses a TLS connection from two threads, which occasionally hangs.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(connect_async(url, ssl=context, proxy=None)) as client,
    ):

        def receive(timeout: float) -> bytes | str:
            return portal.call(asyncio.wait_for, client.recv(), timeout)

        yield SimpleNamespace(send=partial(portal.call, client.send), recv=receive)


def test_events_are_messages_over_tls(streaming):
    with over_tls(streaming) as socket:
        pieces, end = ask(socket, '{"events": true}')
    assert [json.loads(piece) for piece in pieces] == [{"a": 1}, {"b": 2}]
    assert end["headers"]["content-type"] == "text/event-stream"


def test_broken_event_streams_end_with_an_error_and_status(streaming):
    with over_tls(streaming) as socket:
        for _ in range(2):
            pieces, end = ask(socket, '{"events": "broken"}')
            assert (pieces[0], end["status"]) == (b'{"a": 1}', 500)
            assert "no more" in end["error"]["message"]


def test_a_client_that_leaves_during_an_answer_causes_no_warning(
    streaming, tmp_path, until, caplog
):
    with caplog.at_level(logging.INFO):
        with over_tls(streaming) as client:
            client.send(
                json.dumps(
                    {"count": 1_000, "size": 1, "pause": 0.05, "file": str(tmp_path / "count")}
                )
            )
            client.recv(DEADLINE)
        until(lambda: "all clients of its batch have disconnected" in caplog.text)
        with over_tls(streaming) as client:
            assert ask(client, '{"events": true}')[1]["status"] == 200
    assert "its stream was interrupted" not in caplog.text


def test_a_client_that_does_not_read_blocks_the_handler(streaming, tmp_path, until):
    file = tmp_path / "count"
    count, size = 400, 100_000
    with over_tls(streaming) as client:
        client.send(json.dumps({"count": count, "size": size, "file": str(file)}))
        until(lambda: file.exists() and int(file.read_text() or 0) > 10)
        counts_seen = []

        def is_held() -> bool:
            counts_seen.append(file.read_text())
            return len(counts_seen) > 50 and len(set(counts_seen[-50:])) == 1

        until(is_held)
        assert int(file.read_text()) < count
        pieces, end = answer_on(client)
    assert (len(pieces), end["status"]) == (count + 1, 200)


def test_a_stopping_server_answers_and_closes_with_code_1012(start_server, tmp_path):
    gate = tmp_path / "open"
    with ExitStack() as server_stack:
        server = server_stack.enter_context(start_server())
        server.register("talker.mar", initial_workers=1)
        with (
            talk(server, x_do="stream-wait", x_file=str(gate)) as busy_client,
            talk(server) as idle_client,
        ):
            busy_client.send(b"x")
            assert busy_client.recv(DEADLINE) == b"a"
            stop = threading.Thread(target=server_stack.close)
            stop.start()
            check_closed(idle_client, 1012)
            gate.touch()
            pieces, end = answer_on(busy_client)
            assert (pieces, end["status"]) == ([b"b"], 200)
            check_closed(busy_client, 1012)
            stop.join(DEADLINE)
            assert not stop.is_alive()


def a_handshake(line: str = "x-do: bytes") -> bytes:
    return (
        "GET /predictions/talker HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: keep-alive, Upgrade\r\n"
        f"Upgrade: WebSocket\r\n{line}\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n"
    ).encode()


def test_frames_sent_with_the_handshake_are_not_lost(server):
    with connect_raw(server) as client:
        client.send(a_handshake() + frame(MESSAGE, b"abc"))
        received_bytes = b""
        while b'"done"' not in received_bytes:
            received_bytes += client.sock.recv(4096)
    assert received_bytes.startswith(b"HTTP/1.1 101")
    assert b"\x82\x03abc" in received_bytes


@pytest.mark.parametrize("line", ["Content-Length: 3", "X-Long: " + "x" * 9000])
def test_an_invalid_handshake_is_refused(server, line):
    with connect_raw(server) as client:
        client.send(a_handshake(line))
        received_bytes = client.read_all()
    assert received_bytes.startswith(b"HTTP/1.1 400")
    assert b"no handshake" in received_bytes


def test_line_ends_in_a_token_are_replaced_by_spaces():
    request = _request_scope(
        {"headers": [(b"sec-websocket-protocol", b"tsx.v1, tsx.token.a%0D%0Aexplain:%20True")]}
    )
    assert request["headers"] == [(b"authorization", b"Bearer a explain: True")]


def test_event_data_is_parsed_from_arbitrary_pieces():
    text = b": hi\r\n\r\ndata: one\r\nevent: x\r\n\r\ndata:two\ndata: three\n\ndata: [DONE]\n\ndata: four"
    for size in (1, 2, 3, 7, 100):
        events = EventParser()
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        received_bytes = [data for piece in pieces for data in events.feed(piece)]
        assert [*received_bytes, *events.feed(b"\n\n")] == [b"one", b"two\nthree", b"four"], size


class Conversation:
    """A WebSocket connection in memory; its application reads messages once `may_read` is set."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.received = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.budget = ByteBudget(8 << 20)
        self.connection = WebSocketConnection(
            a_handshake(),
            ServerState(),
            1 << 20,
            self.budget,
            Timeouts(*[1] * 6),
            Turns(asyncio.get_running_loop()),
            lambda _: None,
        )
        self.transport = FakeTransport()
        self.connection.start(self.transport, self.take, {})

    async def take(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        await self.may_read.wait()
        while (message := await receive())["type"] == "websocket.receive":
            self.messages.append(message["bytes"])
            self.received.set()


def frame(opcode: int, body: bytes = b"") -> bytes:
    """Return a frame with an all-zero mask."""
    return bytes([opcode, 0x80 | len(body), 0, 0, 0, 0]) + body


PING, PONG, FRAGMENT, FIRST, MESSAGE = 0x89, 0x8A, 0x00, 0x02, 0x82
FLOODS = {
    "pings": frame(PING) * (MAX_IDLE_FRAMES + 1),
    "pongs": frame(PONG, b"x") * (MAX_IDLE_FRAMES + 1),
    "empty fragments": frame(FIRST) + frame(FRAGMENT) * MAX_IDLE_FRAMES,
    "fragments of one byte": frame(FIRST, b"x") + frame(FRAGMENT, b"x") * (MAX_FRAGMENTS + 1),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_empty_frames_are_limited(flood, monkeypatch):
    monkeypatch.setattr("tsx_runtime.http.websocket.REFUSAL_HOLD_S", 0)

    conversation = Conversation()
    await asyncio.sleep(0)
    conversation.connection.data_received(flood * 2)
    await asyncio.wait_for(conversation.transport.closed.wait(), DEADLINE)
    assert (1008).to_bytes(2, "big") in conversation.transport.written
    assert conversation.transport.paused
    assert not conversation.messages


async def test_frames_within_the_limits_pass():
    conversation = Conversation()
    await asyncio.sleep(0)
    frames = (
        frame(FIRST)
        + frame(FRAGMENT, b"x") * 1000
        + frame(PING) * (MAX_IDLE_FRAMES - 1)
        + frame(0x80)
    )
    for _ in range(5):
        conversation.connection.data_received(frames)
        await conversation.received.wait()
        conversation.received.clear()
        conversation.connection.on_tick()
    assert conversation.messages == [b"x" * 1000] * 5
    assert not conversation.transport.is_closing()


async def test_a_large_message_may_have_many_fragments():
    conversation = Conversation()
    await asyncio.sleep(0)
    fragment = bytes([FRAGMENT, 0xFE]) + (500).to_bytes(2, "big") + bytes(4) + bytes(500)
    conversation.connection.data_received(frame(FIRST) + fragment * 1900 + frame(0x80))
    await conversation.received.wait()
    assert conversation.messages == [bytes(950_000)]


@pytest.mark.slow
async def test_one_loop_iteration_parses_few_frames_and_delivers_one_message():
    conversation = Conversation()
    await asyncio.sleep(0)
    count = 3000
    conversation.connection.data_received(frame(MESSAGE, b"x") * count)
    iterations = 0
    while len(conversation.messages) < count:
        message_count, bytes_ahead = (
            len(conversation.messages),
            len(conversation.connection._unparsed),
        )
        await asyncio.sleep(0)
        iterations += 1
        assert len(conversation.messages) - message_count <= 1
        assert bytes_ahead - len(conversation.connection._unparsed) <= FRAMES_PER_TURN * len(
            frame(MESSAGE, b"x")
        )
    assert iterations >= count


@pytest.mark.slow
async def test_pipelined_messages_are_limited_and_not_lost():
    conversation, count = Conversation(), 5000
    connection, budget = conversation.connection, conversation.budget
    conversation.may_read.clear()
    connection.data_received(frame(MESSAGE) * count)
    for _ in range(3000):
        await asyncio.sleep(0)
    assert len(connection._complete_messages) < 1000
    assert conversation.transport.pauses == [True]
    conversation.may_read.set()
    while len(conversation.messages) < count:
        await asyncio.sleep(0)
        assert (
            budget.used >= len(connection._unparsed)
            or len(connection._unparsed) <= MAX_UNCOUNTED_BYTES
        )
    assert conversation.messages == [b""] * count
    assert conversation.transport.pauses == [True, False]
    assert budget.used == 0
