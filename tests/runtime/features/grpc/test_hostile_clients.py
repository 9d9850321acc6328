"""Clients that attack the gRPC port: others are still answered, and memory does not grow."""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.runtime.features.grpc.conftest import TIMEOUT, Client, a_server, connected
from tests.support.clients import hostile_http2 as http2
from tests.support.clients.hostile_http2 import (
    HostileConnection,
    call_headers,
    frame,
    literal,
    message,
)
from tests.support.servers import Running

pytestmark = pytest.mark.slow

SERVICE = b"/org.pytorch.serve.grpc.inference.InferenceAPIsService/"
PREDICT = SERVICE + b"Predictions"
STREAMS, CALLS = 100, 150
MAX_MESSAGE_BYTES, BUDGET = 2_000_000, 5_000_000
# Allowed growth in bytes; each attack would take several times this much.
GROWTH = 64 << 20
NO_WINDOW = struct.pack(">HI", http2.INITIAL_WINDOW_SIZE, 0)
STREAM = b"\xee\xee\xee\xee"  # placeholder for a stream number
CODES = {code.value[0]: code for code in grpc.StatusCode}


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with a_server(
        tmp_path_factory.mktemp("attacked"),
        store / "talker.mar",
        max_request_size=MAX_MESSAGE_BYTES,
        max_response_size=MAX_MESSAGE_BYTES,
        max_inflight_bytes=BUDGET,
        grpc_max_concurrent_calls=CALLS,
        grpc_max_connections=50,
        grpc_message_timeout=2,
        write_timeout=1,
        header_timeout=3,
    ) as server_process:
        yield server_process


@pytest.fixture(scope="module")
def client(server: Running, generated: dict[str, Any]) -> Iterator[Client]:
    with connected(server, generated) as client:
        client.ask()
        yield client


Attack = Callable[..., HostileConnection]
Until = Callable[[Callable[[], object]], None]


@pytest.fixture
def attack(server: Running, client: Client, until: Until) -> Iterator[Attack]:
    """Return a function that opens hostile connections.

    Afterwards another client must be answered, memory unchanged, and no request pending.
    """
    process = psutil.Process(server.process.pid)
    size: int = process.memory_info().rss
    connections: list[HostileConnection] = []

    def connect(settings: bytes = b"") -> HostileConnection:
        connections.append(HostileConnection(server.address("gRPC predictions"), settings))
        return connections[-1]

    yield connect
    assert client.ask()[0]
    assert process.memory_info().rss - size < GROWTH
    for connection in connections:
        connection.sock.close()
    until(
        lambda: (
            is_answered(client, data=bytes(MAX_MESSAGE_BYTES - 1000))
            and client.count_pending() == 0
        )
    )


def is_answered(client: Client, **inputs: bytes) -> bool:
    try:
        return bool(client.ask(**({"do": b"status"} | inputs))[0])
    except grpc.RpcError:
        return False


def has_ended(connection: HostileConnection, client: Client, stream: int) -> bool:
    """Return whether a call has ended.

    gRPC's event loop keeps the last call until the next one arrives, so another call is made.
    """
    connection.read(0.05)
    return is_answered(client) and (connection.closed or stream in connection.finished)


def open_calls(connection: HostileConnection, count: int, end: bytes = b"") -> None:
    """Open calls; each sends its headers and then the frame `end` for its own stream."""
    block = call_headers(PREDICT)
    for first in range(0, count, 50):
        streams = range(2 * first + 1, 2 * min(first + 50, count) + 1, 2)
        heads = (
            (stream, frame(http2.HEADERS, http2.END_HEADERS, stream, block)) for stream in streams
        )
        calls = (head + end.replace(STREAM, struct.pack(">I", stream)) for stream, head in heads)
        if not connection.send(b"".join(calls)):
            return


def placeholder_frame(kind: int, flags: int, payload: bytes) -> bytes:
    return frame(kind, flags, int.from_bytes(STREAM, "big"), payload)


def request(client: Client, **inputs: bytes) -> bytes:
    return bytes(client.request(**inputs).SerializeToString())


def send_call(
    connection: HostileConnection,
    data: bytes,
    stream: int = 1,
    path: bytes = PREDICT,
    *headers: tuple[bytes, bytes],
) -> None:
    block = call_headers(path, headers)
    connection.send(frame(http2.HEADERS, http2.END_HEADERS, stream, block))
    for start in range(0, len(data), 16384):
        flags = http2.END_STREAM if start + 16384 >= len(data) else 0
        connection.send(frame(http2.DATA, flags, stream, data[start : start + 16384]))


def end_call(connection: HostileConnection, data: bytes, *header: bytes) -> grpc.StatusCode:
    """Make a call with one additional header and return its status code."""
    connection.settle()
    send_call(connection, data, 1, PREDICT, header)  # type: ignore[arg-type]  # name and value
    connection.wait_end(1)
    return CODES[connection.status(1)]


@pytest.mark.parametrize("body", [b"", b"body"])
def test_calls_that_are_reset_at_once_do_not_accumulate(
    client: Client, attack: Attack, body: bytes
) -> None:
    connection = attack()
    data = (
        placeholder_frame(http2.DATA, http2.END_STREAM, message(request(client))) if body else b""
    )
    open_calls(connection, 10_000, data + placeholder_frame(http2.RST_STREAM, 0, b"\0\0\0\x08"))
    assert is_answered(client)
    connection.settle()


def test_a_ping_flood_ends_the_connection(client: Client, attack: Attack) -> None:
    connection = attack()
    for _ in range(20):
        connection.send(frame(http2.PING, 0, 0, b"attacker") * 500)
    assert is_answered(client)
    while connection.goaway is None and not connection.closed:
        connection.settle()
    # A reset of the connection may hide the reason.
    calm = (http2.ENHANCE_YOUR_CALM, b"too_many_pings")
    assert connection.closed or connection.goaway == calm


@pytest.mark.parametrize(
    "flood",
    [
        frame(http2.SETTINGS, 0, 0, struct.pack(">HI", 3, 100)),
        frame(http2.SETTINGS, http2.ACK, 0),
        frame(http2.PRIORITY, 0, 1, bytes(5)),
        frame(http2.WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
        frame(0x42, 0, 0, b"unknown"),
        frame(http2.RST_STREAM, 0, 1, b"\0\0\0\x08"),
    ],
    ids=["SETTINGS", "SETTINGS ACK", "PRIORITY", "WINDOW_UPDATE", "unknown", "RST_STREAM"],
)
def test_a_frame_flood_does_not_grow_memory(client: Client, attack: Attack, flood: bytes) -> None:
    connection = attack()
    for _ in range(20):
        connection.send(flood * 1000)
    assert is_answered(client)
    connection.settle()


def test_a_flood_of_empty_data_ends_with_the_message_timeout(
    client: Client, attack: Attack, until: Until
) -> None:
    connection = attack()
    open_calls(connection, 1)
    for _ in range(20):
        connection.send(frame(http2.DATA, 0, 1) * 1000)
    assert is_answered(client)
    until(lambda: has_ended(connection, client, 1))


@pytest.mark.parametrize(
    "piece",
    [b"", literal(b"x-many", b"b" * 16_000), b"\xbe" * 16_000],
    ids=["empty", "many", "HPACK bomb"],
)
def test_an_endless_header_list_is_not_stored(client: Client, attack: Attack, piece: bytes) -> None:
    connection = attack()
    block = call_headers(PREDICT) + literal(b"x-bomb", b"b" * 3900, indexed=True)
    connection.send(frame(http2.HEADERS, 0, 1, block))
    for _ in range(1000):
        if not connection.send(frame(http2.CONTINUATION, 0, 1, piece) * (1 if piece else 100)):
            break
    assert is_answered(client)
    if connection.send(frame(http2.CONTINUATION, http2.END_HEADERS, 1)):
        connection.settle()
    assert is_answered(client)


def test_the_limit_of_calls_per_connection_is_announced(client: Client, attack: Attack) -> None:
    connection = attack()
    connection.settle()
    assert connection.max_streams == STREAMS
    open_calls(connection, 5_000)
    assert is_answered(client)
    connection.settle()
    assert connection.closed or sum(connection.reset.values()) > 0


def refusal(client: Client) -> Any:
    """Return the error of the first of the client's next calls that fails, if any."""
    for _ in range(20):
        try:
            client.ask()
        except grpc.RpcError as error:
            return error
    return None


def test_calls_without_a_message_are_ended_and_further_ones_refused(
    server: Running, client: Client, attack: Attack, until: Until
) -> None:
    refusal_error, connections, deadline = None, [], time.monotonic() + TIMEOUT
    # On a slow machine the calls may end before the client sends its own call.
    while refusal_error is None:
        assert time.monotonic() < deadline
        for connection in connections:
            connection.sock.close()
        connections = [attack(), attack()]
        for connection in connections:
            connection.settle()
            open_calls(connection, STREAMS, placeholder_frame(http2.DATA, 0, b"\0\0"))
        refusal_error = refusal(client)
    assert refusal_error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "grpc_max_concurrent_calls" in refusal_error.details()
    assert dict(refusal_error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
    health = HealthStub(client.inference_channel).Check(HealthCheckRequest(), timeout=TIMEOUT)
    assert health.status == HealthCheckResponse.SERVING
    # Here grpc_message_timeout ends the calls.
    until(lambda: is_answered(client))
    for connection in connections:
        until(lambda connection=connection: has_ended(connection, client, 1))


def connect_plainly(server: Running) -> socket.socket:
    host, _, port = server.address("gRPC predictions").rpartition(":")
    return socket.create_connection((host, int(port)), TIMEOUT)


def test_a_silent_connection_is_closed(server: Running, client: Client) -> None:
    with connect_plainly(server) as sock:
        while sock.recv(1 << 16):
            pass
    assert is_answered(client)


def test_connections_beyond_the_limit_are_closed_and_older_ones_kept(
    client: Client, server: Running
) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(connect_plainly(server)) for _ in range(60)]
        assert is_answered(client)
        assert any(not sock.recv(1 << 16) for sock in socks[-5:])


@pytest.mark.parametrize("method", [b"Predictions", b"StreamPredictions"])
def test_an_unread_answer_is_dropped_after_the_write_timeout(
    client: Client, attack: Attack, until: Until, method: bytes
) -> None:
    connection = attack(NO_WINDOW)
    connection.settle()
    data = message(request(client, do=b"large", data=bytes(500_000)))
    for stream in (1, 3, 5):
        send_call(connection, data, stream, SERVICE + method)
    for stream in (1, 3, 5):
        until(lambda stream=stream: has_ended(connection, client, stream))
    assert not connection.closed, connection.goaway
    assert connection.data[1] == 0


def gzip_bomb(megabytes: int) -> bytes:
    """Return independent gzip blocks, one kilobyte for each megabyte of content."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08" + bytes(6) + b"\xff" + block * megabytes + b"\x03\0" + bytes(8)


def test_a_message_is_decompressed_only_up_to_the_limit(client: Client, attack: Attack) -> None:
    bomb = message(gzip_bomb(500), compressed=True)
    code = end_call(attack(), bomb, b"grpc-encoding", b"gzip")
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("compressed", "encoding"),
    [
        (b"\x1f\x8b\x08 not gzip", b"gzip"),
        (gzip_bomb(1)[:500], b"gzip"),
        (b"\xff" * 99, b"identity"),
    ],
)
def test_an_invalid_message_is_refused_and_not_logged(
    server: Running, client: Client, attack: Attack, compressed: bytes, encoding: bytes
) -> None:
    data = message(compressed, compressed=encoding == b"gzip")
    code = end_call(attack(), data, b"grpc-encoding", encoding)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in server.log


def test_a_length_beyond_the_limit_is_refused_before_reading(
    client: Client, attack: Attack
) -> None:
    connection = attack()
    connection.settle()
    connection.send(frame(http2.HEADERS, http2.END_HEADERS, 1, call_headers(PREDICT)))
    connection.send(frame(http2.DATA, 0, 1, struct.pack(">BI", 0, 2**32 - 1)))
    for _ in range(2000):
        if 1 in connection.finished or not connection.send(frame(http2.DATA, 0, 1, bytes(16_000))):
            break
    connection.wait_end(1)
    assert 1 in connection.finished


@pytest.mark.parametrize("timeout", [b"99999999H", b"-1S", b"1x", b"999999999999S", b"", b"0n"])
def test_invalid_deadlines_end_at_most_their_own_call(
    client: Client, attack: Attack, timeout: bytes
) -> None:
    end_call(attack(), message(request(client)), b"grpc-timeout", timeout)
    assert is_answered(client)


@pytest.mark.parametrize("ending", ["cancel", "deadline", "disconnect", "worker death"])
def test_bytes_of_calls_are_limited_and_freed_after_any_ending(
    server: Running, client: Client, attack: Attack, until: Until, tmp_path: Path, ending: str
) -> None:
    begun_file, file = tmp_path / "begun", tmp_path / "go"
    data, timeout = bytes(MAX_MESSAGE_BYTES - 10_000), 0.7 if ending == "deadline" else TIMEOUT
    waiting_call = client.request(
        do=b"wait", file=str(file).encode(), begun=str(begun_file).encode(), data=data
    )
    with grpc.insecure_channel(
        server.address("gRPC predictions"), [("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        ask = channel.unary_unary(PREDICT.decode(), type(waiting_call).SerializeToString)
        calls = [ask.future(waiting_call, timeout=timeout) for _ in range(2)]

        def is_full() -> bool:
            """Repeat calls that grpc_message_timeout ended, as it does on a slow machine."""
            calls[:] = [
                ask.future(waiting_call, timeout=timeout) if call.done() else call for call in calls
            ]
            return begun_file.exists() and is_refused_for_room(client, data)

        if ending == "deadline":
            assert None not in [call.exception() for call in calls]
        else:
            until(is_full)
        if ending == "cancel":
            for call in calls:
                call.cancel()
        elif ending == "disconnect":
            channel.close()
        elif ending == "worker death":
            for worker in psutil.Process(server.process.pid).children(recursive=True):
                if "forkserver" not in " ".join(worker.cmdline()) or not worker.children():
                    worker.kill()
                    break
        file.touch()
    until(lambda: is_answered(client, data=data))


def is_refused_for_room(client: Client, data: bytes) -> bool:
    try:
        client.ask(do=b"status", data=data, timeout=0.2)
    except grpc.RpcError as error:
        unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
        return unavailable and "max_inflight_bytes" in error.details()
    return False
