"""The budget of bytes in flight, tested over real sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.kit.connections import connect_raw
from tests.runtime.conftest import RunningServer
from tests.support.clients.rawhttp import Answer, RawConnection, chunked, request
from tsx_runtime.errors import NoRoom

Connect = Callable[[], RawConnection]
Until = Callable[[Callable[[], object]], None]
LARGE_BYTES = 1_000_000
PATH = b"/predictions/talker"
BYTES = (b"x-do", b"bytes")


@pytest.fixture(scope="module")
def tight_server(start_server: Callable[..., object]) -> Iterator[RunningServer]:
    """Start a server with room for one and a half large bodies."""
    values = {
        "max_request_size": LARGE_BYTES,
        "max_response_size": LARGE_BYTES,
        "max_inflight_bytes": 1,
        "job_queue_size": 8,
    }
    with start_server(**values, body_idle_timeout=1, write_timeout=2) as server:
        server.register("talker.mar", initial_workers=1)
        yield server


@pytest.fixture
def connect(tight_server: RunningServer) -> Iterator[Callable[[], RawConnection]]:
    connections: list[RawConnection] = []

    def connect() -> RawConnection:
        connections.append(connect_raw(tight_server))
        return connections[-1]

    yield connect
    for connection in connections:
        connection.__exit__()


def bytes_in_use(server: RunningServer) -> int:
    return int(server.call(lambda: server.registry.bytes_in_flight.used))


def a_request(lane: str, size: int, *headers: tuple[bytes, bytes]) -> bytes:
    headers = headers or (BYTES,)
    if lane == "fast":
        return request(target=PATH, headers=headers, body=bytes(size))
    head = request(target=PATH, headers=[*headers, (b"Transfer-Encoding", b"chunked")])
    return head + chunked([bytes(size)])


def unfinished_request(lane: str, size: int) -> bytes:
    """Return a request whose body lacks its end."""
    return a_request(lane, size)[: -1 if lane == "fast" else -8]


def check_refusal(answer: Answer | None) -> None:
    assert (answer.status, answer.header(b"retry-after")) == (503, b"1")
    assert "max_inflight_bytes" in json.loads(answer.body)["message"]


LANES = ("fast", "asgi")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("second_lane", LANES)
def test_large_bodies_are_refused_until_there_is_room_but_small_ones_pass(
    lane, second_lane, tight_server, connect, until
):
    first, second = connect(), connect()
    first.send(unfinished_request(lane, LARGE_BYTES))
    until(lambda: bytes_in_use(tight_server) >= LARGE_BYTES - 70_000)
    second.send(unfinished_request(second_lane, LARGE_BYTES))
    refusal = second.answer()
    check_refusal(refusal)
    assert refusal.header(b"connection") == b"close"
    assert tight_server.ask(b"small", x_do="bytes").content == b"small"
    first.sock.close()
    until(lambda: bytes_in_use(tight_server) == 0)
    second.sock.close()
    third = connect()
    third.send(a_request(second_lane, LARGE_BYTES))
    answer = third.answer()
    assert (answer.status, len(answer.body)) == (200, LARGE_BYTES)
    until(lambda: bytes_in_use(tight_server) == 0)


@pytest.mark.parametrize("lane", LANES)
def test_refusing_a_complete_body_keeps_the_connection_open(lane, tight_server, connect):
    budget = tight_server.registry.bytes_in_flight
    connection = connect()
    tight_server.call(lambda: budget.take(budget.limit - budget.limit // 8))
    connection.send(a_request(lane, 70_000))
    answer = connection.answer()
    tight_server.call(lambda: budget.give(budget.limit - budget.limit // 8))
    check_refusal(answer)
    connection.send(a_request(lane, 70_000))
    answer = connection.answer()
    # A body in several pieces is refused at its first piece, which ends the connection.
    assert answer is None or (answer.status, len(answer.body)) == (200, 70_000)


def test_a_stalled_body_is_answered_408_and_frees_its_bytes(tight_server, connect, until):
    connections = [connect() for _ in LANES]
    for connection, lane in zip(connections, LANES, strict=True):
        connection.send(unfinished_request(lane, LARGE_BYTES // 2))
    for connection in connections:
        answer = connection.answer()
        assert answer.status == 408
        assert "body_idle_timeout" in json.loads(answer.body)["message"]
        assert connection.answer() is None
    until(lambda: bytes_in_use(tight_server) == 0)


ENDINGS = (
    "answered",
    "raise",
    "exit",
    "stream",
    "break",
    "refused late",
    "left in the body",
    "left while queued",
    "left while running",
)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ending", ENDINGS)
def test_every_end_of_a_request_frees_its_bytes(
    ending, lane, tight_server, connect, until, tmp_path
):
    gate, size = tmp_path / "go", 300_000
    wait = request(target=PATH, headers=[(b"x-do", b"wait"), (b"x-file", bytes(gate))], body=b"")
    blocking_connection, connection = connect(), connect()
    version = tight_server.registry.find("talker", None)
    until(lambda: version.ready)
    if ending == "left in the body":
        connection.send(unfinished_request(lane, size))
        until(lambda: bytes_in_use(tight_server) > 0)
        connection.sock.close()
    elif ending.startswith("left"):
        if ending == "left while queued":
            blocking_connection.send(wait)
            until(lambda: version.in_flight - version.pending == 1)
        connection.send(a_request(lane, size, (b"x-do", b"wait"), (b"x-file", bytes(gate))))
        until(lambda: version.in_flight == 1 + (ending == "left while queued"))
        assert bytes_in_use(tight_server) >= size
        connection.sock.close()
    elif ending == "refused late":
        connection.send(unfinished_request(lane, size))
        tight_server.call(lambda: tight_server.registry.unregister("talker"))
        connection.send(a_request(lane, size)[-1 if lane == "fast" else -8 :])
        answer = connection.answer()
        tight_server.register("talker.mar", initial_workers=1)
        assert answer.status == 404
    else:
        action = {"answered": b"bytes"}.get(ending, ending.encode())
        connection.send(a_request(lane, size, (b"x-do", action)))
        assert connection.answer() is not None
    gate.touch()
    until(lambda: bytes_in_use(tight_server) == 0)


@pytest.mark.parametrize("lane", LANES)
def test_unread_answers_count_and_the_slowest_clients_are_cut_off(lane, tight_server, until):
    budget = tight_server.registry.bytes_in_flight
    cut_off_before = budget.cut_off
    readers: list[socket.socket] = []
    url = tight_server.inference.base_url
    for _ in range(4):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((url.host, url.port))
        readers.append(sock)
    try:
        max_unread = 0
        # Bytes in kernel buffers are not counted; therefore each client sends several requests.
        for sock in readers * 12:
            try:
                sock.sendall(a_request(lane, 500_000))
            except OSError:
                break
            until(lambda: bytes_in_use(tight_server) == tight_server.call(lambda: budget.unread))
            max_unread = max(max_unread, budget.unread)
            if budget.cut_off > cut_off_before:
                break
        assert max_unread
        assert budget.cut_off > cut_off_before
        assert bytes_in_use(tight_server) <= budget.limit
        assert tight_server.ask(b"small", x_do="bytes").content == b"small"
    finally:
        for sock in readers:
            sock.close()
    until(lambda: bytes_in_use(tight_server) == 0)


def test_metrics_show_the_bytes_in_flight(tight_server):
    budget = tight_server.registry.bytes_in_flight
    tight_server.call(lambda: budget.take(123))
    with pytest.raises(NoRoom):
        tight_server.call(lambda: budget.take(budget.limit))
    text = tight_server.metrics.get("/metrics").text
    tight_server.call(lambda: budget.give(123))
    lines = {
        line.split("{")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("tsx_")
    }
    assert lines["tsx_bytes_in_flight"] == 123
    assert lines["tsx_unread_bytes"] == 0
    assert lines["tsx_bodies_refused_total"] == budget.refused > 0
    assert lines["tsx_clients_cut_off_total"] == budget.cut_off
