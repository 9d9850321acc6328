"""Bodies on the fast lane, and clients that are slow or leave."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import uvicorn
from uvicorn.server import ServerState

from tests.kit.connections import connect_raw
from tests.kit.transports import FakeTransport
from tests.runtime.conftest import RunningServer
from tests.support.apps import bare_app
from tests.support.clients.rawhttp import RawConnection, request
from tsx_runtime.http.fast_lane.connection import FastLane
from tsx_runtime.settings.schema import Settings

MEASURE = """
def handle(data, context):
    return None if data is None else [describe(row["body"]) for row in data]


def describe(body):
    return f"{type(body).__name__} {len(body)} {sum(body[::4099])} {len(set(body))}"
"""
FLOOD = """
def handle(data, context):
    from ts.handler_utils.utils import send_intermediate_predict_response

    if data is None:
        return None
    for _ in range(int(context.get_request_header(0, "x-count") or 0)):
        send_intermediate_predict_response(["x" * 65536], {0: context.get_request_id(0)}, "more", 200, context)
    if context.get_request_header(0, "x-broken"):
        raise ValueError("broken")
    return ["end"]
"""
END = b"3\r\nend\r\n0\r\n\r\n"


@pytest.fixture(scope="module")
def measuring_server(start_server: Any) -> Iterator[RunningServer]:
    with start_server(max_request_size=12_000_000) as server:
        server.write_mar("measure.mar", handler=MEASURE)
        server.register("measure.mar", initial_workers=1, batch_size=4)
        yield server


def measure_request(body: bytes) -> bytes:
    return request(target=b"/predictions/measure", body=body)


def body_of(connection: RawConnection) -> bytes:
    answer = connection.answer()
    assert answer.complete
    return answer.body


def describe_body(body: bytes) -> bytes:
    return f"bytearray {len(body)} {sum(body[::4099])} {len(set(body))}".encode()


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 300_000, 11_000_000])
def test_a_body_of_any_size_arrives_unchanged(measuring_server, size):
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    with connect_raw(measuring_server) as connection:
        for sent_body in (body, body[:9]):
            connection.send(measure_request(sent_body))
            assert body_of(connection) == describe_body(sent_body)


def test_large_bodies_of_one_batch_are_not_mixed_up(measuring_server):
    bodies = [bytes([number]) * (200_000 + number) for number in range(12)]
    connections = [connect_raw(measuring_server) for _ in bodies]
    for connection, body in zip(connections, bodies, strict=True):
        connection.send(measure_request(body))
    for connection, body in zip(connections, bodies, strict=True):
        assert body_of(connection) == describe_body(body)
        connection.sock.close()


@pytest.fixture(scope="module")
def flooding_server(start_server: Any) -> Iterator[RunningServer]:
    """Start a server whose model streams as many pieces of 64 KiB as the request asks for."""
    with start_server(max_response_size=1_000_000) as server:
        server.write_mar("flood.mar", handler=FLOOD)
        server.register("flood.mar", initial_workers=1, response_timeout=60)
        yield server


def flood_request(count: int, *headers: tuple[bytes, bytes]) -> bytes:
    headers = ((b"x-count", b"%d" % count), *headers)
    return request(target=b"/predictions/flood", headers=headers, body=b"")


def is_worker_paused(server: RunningServer) -> bool:
    """Tell whether the worker waits for a client to read more of its stream."""
    (worker,) = server.registry.find("flood").workers
    return worker.channel is not None and bool(worker.channel.is_paused)


def test_an_unread_stream_blocks_the_worker_but_uses_no_memory(flooding_server, until):
    memory_before = psutil.Process().memory_info().rss
    with connect_raw(flooding_server) as connection:
        connection.send(flood_request(2000))  # 131 MB
        until(lambda: is_worker_paused(flooding_server))
        assert psutil.Process().memory_info().rss - memory_before < 40_000_000
        received_bytes, end = 0, b""
        while chunk := connection.sock.recv(1 << 20):
            received_bytes += len(chunk)
            end = (end + chunk)[-len(END) :]
            if end == END:
                break
        assert received_bytes > 2000 * 65536
    assert psutil.Process().memory_info().rss - memory_before < 60_000_000


def test_a_client_that_leaves_an_unread_stream_frees_the_worker(flooding_server, until):
    with connect_raw(flooding_server) as connection:
        connection.send(flood_request(500))
        until(lambda: is_worker_paused(flooding_server))
    assert flooding_server.ask(path="/predictions/flood").text == "end"


@pytest.mark.parametrize(
    ("headers", "end"), [([], END), ([(b"x-broken", b"1")], b"")], ids=["whole", "broken"]
)
def test_a_stream_that_ends_for_a_slow_client_frees_the_worker(
    flooding_server, until, headers, end
):
    # The server gets the worker's last frames in one read, before the client has read earlier ones.
    # The kernel decides how many frames one read returns. Therefore the test tries ten lengths of
    # the stream: with one of them, the last frame comes in the same read as a frame that is held
    # back.
    address = connect_raw(flooding_server).sock.getpeername()
    for count in range(200, 210):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(address)
            sock.sendall(flood_request(count, *headers))
            until(lambda: is_worker_paused(flooding_server))
            received_bytes = b""
            while (not end or not received_bytes.endswith(end)) and (chunk := sock.recv(4096)):
                received_bytes = received_bytes[-100:] + chunk
            assert received_bytes.endswith(end)
        assert flooding_server.ask(path="/predictions/flood").text == "end"


def connect_fake(rate: int = 1 << 14, **settings: Any) -> tuple[FastLane, FakeTransport]:
    app = bare_app(Settings.model_validate(settings))
    app.timeouts = app.timeouts._replace(body_rate=rate)
    connection = FastLane(uvicorn.Config(app, lifespan="off", log_config=None), ServerState(), {})
    transport = FakeTransport()
    connection.connection_made(transport)
    return connection, transport


@pytest.mark.anyio
async def test_a_client_that_reads_again_regains_its_full_timeout():
    connection, transport = connect_fake(write_timeout=3)
    transport.unread = 1000
    connection.pause_writing()
    connection.on_tick()
    connection.resume_writing()
    for _ in range(10):  # a long stream that is read without delay
        connection.on_tick()
    transport.unread = 2000
    connection.pause_writing()
    connection.on_tick()
    assert not transport.aborted
    for _ in range(5):
        connection.on_tick()
    assert transport.aborted


@pytest.mark.anyio
async def test_a_closed_connection_with_unread_bytes_is_aborted():
    connection, transport = connect_fake(write_timeout=3)
    transport.unread = 1000  # too little to pause the transport
    transport.close()
    for _ in range(6):
        connection.on_tick()
    assert transport.aborted


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("step_bytes", "rate", "seconds"), [(1, 10, 3), (9, 10, 30), (10, 20, 6), (10, 10, None)]
)
async def test_a_body_must_arrive_at_the_minimum_rate(step_bytes, rate, seconds):
    # A body may take 3 s plus the time that its received bytes need at the minimum rate.
    connection, transport = connect_fake(rate, body_timeout=3)
    connection.data_received(b"POST /nowhere HTTP/1.1\r\nContent-Length: 100000\r\n\r\n")
    ticks = 0
    while not transport.is_closing() and ticks < 100:
        ticks += 1
        connection.data_received(b"x" * step_bytes)
        connection.on_tick()
    assert (
        ticks < 100 and b"408" in transport.written and b"body_timeout" in transport.written
    ) == (seconds is not None)
    assert seconds is None or seconds <= ticks <= seconds + 2


@pytest.mark.parametrize(
    ("framing", "end"),
    [
        (b"Content-Length: 4\r\n\r\nab", b"cd"),
        (b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"2\r\ncd\r\n0\r\n\r\n"),
    ],
)
def test_a_model_removed_during_a_body_is_not_found_on_either_lane(empty, framing, end):
    empty.register("talker.mar", initial_workers=1)
    with connect_raw(empty) as connection:
        connection.send(b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\n" + framing)
        assert empty.ask().status_code == 200
        empty.call(lambda: empty.registry.unregister("talker"))
        connection.send(end)
        answer = connection.answer()
    assert (answer.status, b"ModelNotFoundException" in answer.body) == (404, True)
