"""Clients that attack gRPC's port with frames, messages and patience: others are answered
meanwhile, and memory stays what it was.
"""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.runtime.grpc.conftest import TIMEOUT, Client, connected
from tests.support.clients import hostile_http2 as http2
from tests.support.clients.hostile_http2 import (
    HostileConnection,
    call_headers,
    frame,
    literal,
    message,
)
from tests.support.servers import FREE_GRPC_PORTS, FREE_PORTS, Running, serving

pytestmark = pytest.mark.slow


SERVICE = b"/org.pytorch.serve.grpc.inference.InferenceAPIsService/"
PREDICT = SERVICE + b"Predictions"
STREAMS, CALLS = 100, 150
LARGEST, BUDGET = 2_000_000, 5_000_000
GROWTH = 64 << 20  # bytes; each of these attacks took several times that, or would
NO_WINDOW = struct.pack(">HI", http2.INITIAL_WINDOW_SIZE, 0)
STREAM = b"\xee\xee\xee\xee"  # in place of a stream's number
CODES = {code.value[0]: code for code in grpc.StatusCode}


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("attacked")
    environment = {
        "TSX_CACHE_DIR": str(directory / "cache"),
        "TSX_STATE_DIR": str(directory / "state"),
        "TSX_MAX_REQUEST_SIZE": str(LARGEST),
        "TSX_MAX_RESPONSE_SIZE": str(LARGEST),
        "TSX_MAX_INFLIGHT_BYTES": str(BUDGET),
        "TSX_GRPC_MAX_CONCURRENT_CALLS": str(CALLS),
        "TSX_GRPC_MAX_CONNECTIONS": "50",
        "TSX_GRPC_MESSAGE_TIMEOUT": "2",
        "TSX_WRITE_TIMEOUT": "1",
        "TSX_HEADER_TIMEOUT": "3",
    }
    with serving(
        ["serve", store / "talker.mar", "--model-store", store, *FREE_PORTS, *FREE_GRPC_PORTS],
        directory,
        environment,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running, generated: dict[str, Any]) -> Iterator[Client]:
    made = connected(server, generated, grpc.insecure_channel)
    made.ask()
    yield made
    made.inference_channel.close()
    made.management_channel.close()


@pytest.fixture
def attack(
    server: Running, client: Client, until: Any
) -> Iterator[Callable[..., HostileConnection]]:
    """Makes connections.

    At the end another client is answered, memory has not grown, and nothing is held any more.
    """
    process = psutil.Process(server.process.pid)
    before, made = process.memory_info().rss, []

    def connect(settings: bytes = b"") -> HostileConnection:
        made.append(HostileConnection(server.address("gRPC predictions"), settings))
        return made[-1]

    yield connect
    assert client.ask()[0]
    assert process.memory_info().rss - before < GROWTH
    for connection in made:
        connection.sock.close()
    until(lambda: is_answered(client, data=bytes(LARGEST - 1000)) and pending(client) == 0)


def is_answered(client: Client, **inputs: bytes) -> bool:
    try:
        return bool(client.ask(**({"do": b"status"} | inputs))[0])
    except grpc.RpcError:
        return False


def has_ended(connection: HostileConnection, client: Client, stream: int) -> bool:
    """gRPC's loop holds on to the call that came last, until the next one comes."""
    connection.read(0.05)
    return is_answered(client) and (connection.closed or stream in connection.finished)


def pending(client: Client) -> int:
    return client.pending()


def opened(
    connection: HostileConnection, count: int, end: bytes = b"", path: bytes = PREDICT
) -> bool:
    """That many calls, each with `end` behind its headers, in a frame of its own stream."""
    block = call_headers(path)
    for first in range(0, count, 50):
        streams = range(2 * first + 1, 2 * min(first + 50, count) + 1, 2)
        heads = (
            (stream, frame(http2.HEADERS, http2.END_HEADERS, stream, block)) for stream in streams
        )
        calls = (head + end.replace(STREAM, struct.pack(">I", stream)) for stream, head in heads)
        if not connection.send(b"".join(calls)):
            return False
    return True


def on_each(kind: int, flags: int, payload: bytes) -> bytes:
    return frame(kind, flags, int.from_bytes(STREAM, "big"), payload)


def request(client: Client, **inputs: bytes) -> bytes:
    return bytes(
        client.messages.PredictionsRequest(model_name="talker", input=inputs).SerializeToString()
    )


def sent(
    connection: HostileConnection,
    data: bytes,
    stream: int = 1,
    path: bytes = PREDICT,
    *extra: tuple[bytes, bytes],
) -> None:
    """A whole call."""
    connection.send(frame(http2.HEADERS, http2.END_HEADERS, stream, call_headers(path, extra)))
    for start in range(0, len(data), 16384):
        flags = http2.END_STREAM if start + 16384 >= len(data) else 0
        connection.send(frame(http2.DATA, flags, stream, data[start : start + 16384]))


@pytest.mark.parametrize("body", [b"", b"body"])
def test_calls_that_are_reset_at_once_are_not_piled_up(
    client: Client, attack: Any, body: bytes
) -> None:
    connection = attack()
    data = on_each(http2.DATA, http2.END_STREAM, message(request(client))) if body else b""
    opened(connection, 10_000, data + on_each(http2.RST_STREAM, 0, b"\0\0\0\x08"))
    assert is_answered(client)
    connection.settle()


def test_pings_in_a_flood_end_the_connection(client: Client, attack: Any) -> None:
    connection = attack()
    for _ in range(20):
        connection.send(frame(http2.PING, 0, 0, b"attacker") * 500)
    assert is_answered(client)
    while connection.goaway is None and not connection.closed:
        connection.settle()
    assert connection.closed or connection.goaway == (
        http2.ENHANCE_YOUR_CALM,
        b"too_many_pings",
    )  # a reset may swallow the reason


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
def test_frames_in_a_flood_fill_no_memory(client: Client, attack: Any, flood: bytes) -> None:
    connection = attack()
    for _ in range(20):
        connection.send(flood * 1000)
    assert is_answered(client)
    connection.settle()


def test_empty_data_in_a_flood_fills_no_memory_and_ends_with_the_message_timeout(
    client: Client, attack: Any, until: Any
) -> None:
    connection = attack()
    opened(connection, 1)
    for _ in range(20):
        connection.send(frame(http2.DATA, 0, 1) * 1000)
    assert is_answered(client)
    until(lambda: has_ended(connection, client, 1))


@pytest.mark.parametrize(
    "piece",
    [b"", literal(b"x-many", b"b" * 16_000), b"\xbe" * 16_000],
    ids=["empty", "many", "HPACK bomb"],
)
def test_a_header_list_without_an_end_is_not_kept(
    client: Client, attack: Any, piece: bytes
) -> None:
    connection = attack()
    connection.send(
        frame(
            http2.HEADERS,
            0,
            1,
            call_headers(PREDICT) + literal(b"x-bomb", b"b" * 3900, indexed=True),
        )
    )
    for _ in range(1000):
        if not connection.send(frame(http2.CONTINUATION, 0, 1, piece) * (1 if piece else 100)):
            break
    assert is_answered(client)
    if connection.send(frame(http2.CONTINUATION, http2.END_HEADERS, 1)):  # else it is closed by now
        connection.settle()
    assert is_answered(client)


def test_a_connection_has_so_many_calls_and_is_reported(client: Client, attack: Any) -> None:
    connection = attack()
    connection.settle()
    assert connection.max_streams == STREAMS
    opened(connection, 5_000)
    assert is_answered(client)
    connection.settle()
    assert connection.closed or sum(connection.reset.values()) > 0


def refusal(client: Client) -> Any:
    """The error of one of its next calls, if any ends with one."""
    for _ in range(20):
        try:
            client.ask()
        except grpc.RpcError as error:
            return error
    return None


def test_calls_whose_messages_do_not_come_are_ended_and_further_ones_refused_meanwhile(
    server: Running, client: Client, attack: Any, until: Any
) -> None:
    refused, connections, deadline = None, [], time.monotonic() + TIMEOUT
    while refused is None:  # on a slow machine the calls are ended before the client asks
        assert time.monotonic() < deadline
        for connection in connections:
            connection.sock.close()
        connections = [attack(), attack()]
        for connection in connections:
            connection.settle()
            opened(connection, STREAMS, on_each(http2.DATA, 0, b"\0\0"))
        refused = refusal(client)
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "as many as grpc_max_concurrent_calls allows" in refused.details()
    assert dict(refused.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
    health = HealthStub(client.inference_channel).Check(HealthCheckRequest(), timeout=TIMEOUT)
    assert health.status == HealthCheckResponse.SERVING
    until(lambda: is_answered(client))  # grpc_message_timeout
    for connection in connections:
        until(lambda connection=connection: has_ended(connection, client, 1))


def test_a_connection_that_says_nothing_is_closed(server: Running, client: Client) -> None:
    host, _, port = server.address("gRPC predictions").rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT) as sock:
        while sock.recv(1 << 16):
            pass
    assert is_answered(client)


def test_connections_beyond_the_limit_are_closed_and_those_that_are_there_go_on(
    client: Client, server: Running
) -> None:
    host, _, port = server.address("gRPC predictions").rpartition(":")
    socks = [socket.create_connection((host, int(port)), TIMEOUT) for _ in range(60)]
    try:
        assert is_answered(client)
        assert any(not sock.recv(1 << 16) for sock in socks[-5:])
    finally:
        for sock in socks:
            sock.close()


@pytest.mark.parametrize("method", [b"Predictions", b"StreamPredictions"])
def test_who_does_not_read_an_answer_holds_it_for_the_write_timeout_alone(
    client: Client, attack: Any, until: Any, method: bytes
) -> None:
    connection = attack(NO_WINDOW)
    connection.settle()
    data = message(request(client, do=b"large", data=bytes(500_000)))
    for stream in (1, 3, 5):
        sent(connection, data, stream, SERVICE + method)
    for stream in (1, 3, 5):
        until(lambda stream=stream: has_ended(connection, client, stream))
    assert not connection.closed, connection.goaway
    assert connection.data[1] == 0


def gzip_bomb(megabytes: int) -> bytes:
    """A kilobyte for each of them: blocks that do not depend on one another."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08" + bytes(6) + b"\xff" + block * megabytes + b"\x03\0" + bytes(8)


def test_a_message_is_unpacked_to_the_limit_and_no_further(client: Client, attack: Any) -> None:
    connection = attack()
    connection.settle()
    sent(
        connection,
        message(gzip_bomb(500), compressed=True),
        1,
        PREDICT,
        (b"grpc-encoding", b"gzip"),
    )
    connection.wait_end(1)
    assert CODES[connection.status(1)] is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("packed", "encoding"),
    [
        (b"\x1f\x8b\x08 not gzip", b"gzip"),
        (gzip_bomb(1)[:500], b"gzip"),
        (b"\xff" * 99, b"identity"),
    ],
)
def test_what_is_no_message_is_refused_and_not_logged(
    server: Running, client: Client, attack: Any, packed: bytes, encoding: bytes
) -> None:
    connection = attack()
    connection.settle()
    sent(
        connection,
        message(packed, compressed=encoding == b"gzip"),
        1,
        PREDICT,
        (b"grpc-encoding", encoding),
    )
    connection.wait_end(1)
    assert CODES[connection.status(1)] is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in server.log


def test_a_length_beyond_the_limit_is_refused_before_its_bytes(client: Client, attack: Any) -> None:
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
def test_odd_deadlines_end_one_call_at_most(client: Client, attack: Any, timeout: bytes) -> None:
    connection = attack()
    connection.settle()
    sent(connection, message(request(client)), 1, PREDICT, (b"grpc-timeout", timeout))
    connection.wait_end(1)
    assert is_answered(client)


@pytest.mark.parametrize("ending", ["cancel", "deadline", "disconnect", "worker death"])
def test_bytes_of_messages_under_way_have_a_budget_and_are_given_back_however_a_call_ends(
    server: Running, client: Client, attack: Any, until: Any, tmp_path: Path, ending: str
) -> None:
    words = {
        "do": b"wait",
        "file": str(tmp_path / "go").encode(),
        "begun": str(tmp_path / "begun").encode(),
    }
    data, timeout = bytes(LARGEST - 10_000), 0.7 if ending == "deadline" else TIMEOUT
    first = client.messages.PredictionsRequest(model_name="talker", input={**words, "data": data})
    with grpc.insecure_channel(
        server.address("gRPC predictions"), [("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        ask = channel.unary_unary(
            PREDICT.decode(), client.messages.PredictionsRequest.SerializeToString
        )
        held = [ask.future(first, timeout=timeout) for _ in range(2)]

        def is_full() -> bool:
            """On a slow machine a message takes longer than grpc_message_timeout, and its call is
            made again.
            """
            held[:] = [ask.future(first, timeout=timeout) if call.done() else call for call in held]
            return (tmp_path / "begun").exists() and refused_for_room(client, data)

        if ending != "deadline":
            until(is_full)
        if ending == "cancel":
            for call in held:
                call.cancel()
        elif ending == "disconnect":
            channel.close()
        elif ending == "worker death":
            for worker in psutil.Process(server.process.pid).children(recursive=True):
                if "forkserver" not in " ".join(worker.cmdline()) or not worker.children():
                    worker.kill()
                    break
        if ending == "deadline":
            for call in held:
                assert call.exception() is not None
        (tmp_path / "go").touch()
    until(lambda: is_answered(client, data=data))


def refused_for_room(client: Client, data: bytes) -> bool:
    try:
        client.ask(do=b"status", data=data, timeout=0.2)
    except grpc.RpcError as error:
        return (
            error.code() is grpc.StatusCode.UNAVAILABLE and "max_inflight_bytes" in error.details()
        )
    return False
