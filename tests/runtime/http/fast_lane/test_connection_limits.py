"""Clients that are slow or send too much, over raw sockets, on both lanes."""

from __future__ import annotations

import json
import socket

import psutil
import pytest

from tests.kit.connections import connect_raw
from tests.support.clients.rawhttp import Answer, RawConnection, chunked, request

PREDICT = b"POST /predictions/talker HTTP/1.1\r\nHost: 127.0.0.1\r\n"
COMPLETE_REQUEST = PREDICT + b"Content-Length: 1\r\n\r\nx"
PING = b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
TOO_LARGE = (
    b"Content-Length: 100001\r\n\r\nx",
    b"Transfer-Encoding: chunked\r\n\r\n" + chunked([bytes(100_001)])[:-5],
)
HEADS = {
    "inference": PREDICT,
    "management": b"POST /models HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n",
}


@pytest.fixture(scope="module")
def impatient_server(start_server):
    """Start a server all of whose timeouts are one second."""
    with start_server(
        header_timeout=1, body_timeout=1, keep_alive_timeout=1, max_header_size=2000
    ) as server:
        server.register("talker.mar", initial_workers=1)
        yield server


@pytest.fixture
def connect(impatient_server):
    connections = []

    def connect(role: str = "inference") -> RawConnection:
        connections.append(connect_raw(impatient_server, role))
        return connections[-1]

    yield connect
    for connection in connections:
        connection.__exit__()


def check_refusal(answer: Answer | None, status: int, setting: str) -> None:
    assert answer.status == status
    assert answer.header(b"connection") == b"close"
    assert answer.header(b"content-type") == b"application/json"
    body = json.loads(answer.body)
    assert body["code"] == status
    assert setting in body["message"]


def test_incomplete_headers_are_answered_408_without_delaying_others(connect, impatient_server):
    slow_connections = []
    for earlier_request in (b"", COMPLETE_REQUEST, PING):
        for start in (b"P", *[PREDICT] * 10, PREDICT + b"X-A: b", b"GET /ping HTTP/1.1\r\n"):
            connection = connect()
            connection.send(earlier_request)
            if earlier_request:
                assert connection.answer().status == 200
            connection.send(start)
            slow_connections.append(connection)
    assert impatient_server.ask().status_code == 200
    for connection in slow_connections:
        check_refusal(connection.answer(), 408, "header_timeout")
        assert connection.answer() is None


def test_a_stalled_body_is_answered_408_but_a_slow_one_may_take_longer(connect):
    """Give a slow client another second for each 16 KiB."""
    steady_connection = connect()
    steady_connection.send(PREDICT + b"Content-Length: 60001\r\n\r\n" + b"x" * 60_000)
    slow_connections = []
    for start in (
        b"Content-Length: 10\r\n\r\n",
        b"Content-Length: 10\r\n\r\nabc",
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
    ):
        connection = connect()
        connection.send(PREDICT + start)
        if b"Expect" in start:
            assert connection.answer().status == 100
        slow_connections.append(connection)
    for connection in slow_connections:
        check_refusal(connection.answer(), 408, "body_timeout")
        assert connection.answer() is None
    steady_connection.send(b"x")
    assert steady_connection.answer().status == 200


def test_a_request_refused_before_its_body_gets_exactly_one_answer(connect):
    """Wait for body_timeout, at which all these connections end at the same time."""
    unknown = connect()
    unknown.send(
        b"POST /predictions/nobody HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
    )
    assert unknown.answer().status == 404
    refused_connections = []
    for role, head in HEADS.items():
        for body in TOO_LARGE:
            connection = connect(role)
            connection.send(head + body)
            check_refusal(connection.answer(), 413, "max_request_size")
            refused_connections.append(connection)
    assert [connection.answer() for connection in (unknown, *refused_connections)] == [None] * 5


@pytest.mark.parametrize("role", HEADS)
def test_a_client_that_sends_before_it_reads_gets_the_refusal(connect, role):
    connection = connect(role)
    connection.send(HEADS[role] + b"Content-Length: 30000000\r\n\r\n" + bytes(30_000_000))
    check_refusal(connection.answer(), 413, "max_request_size")
    assert connection.answer() is None


def test_an_idle_connection_is_closed(connect):
    idle_connections = []
    for earlier_request in (b"", COMPLETE_REQUEST, COMPLETE_REQUEST + b"\r\n", PING):
        connection = connect()
        idle_connections.append(connection)
        connection.send(earlier_request)
        if earlier_request:
            assert connection.answer().status == 200
            # Old clients send a line end after a body; it does not start a new request.
            connection.send(b"\r", b"\n")
    assert [connection.answer() for connection in idle_connections] == [None] * 4


@pytest.mark.parametrize("target", [b"/predictions/talker", b"/ping", b"/nowhere"])
@pytest.mark.parametrize("kind", ["one long header", "many headers", "a long URL", "no end"])
def test_headers_that_are_too_large_are_answered_431(connect, target, kind):
    connection = connect()
    if kind == "a long URL":
        connection.send(request(target=target + b"?" + b"x" * 3000))
    else:
        headers = (
            [(b"X-A", b"b" * 3000)]
            if kind == "one long header"
            else [(b"X-%d" % number, b"b" * 90) for number in range(30)]
        )
        request_bytes = request(target=target, headers=headers, body=b"x")
        connection.send(
            *(
                [request_bytes[:1500], request_bytes[1500:2500]]
                if kind == "no end"
                else [request_bytes]
            )
        )
    check_refusal(connection.answer(), 431, "max_header_size")
    assert connection.answer() is None


def test_headers_after_an_asgi_request_are_limited(connect):
    connection = connect()
    lines = b"".join(b"X-%d: %b\r\n" % (number, b"b" * 90) for number in range(200))
    connection.send(PREDICT + b"Transfer-Encoding: chunked\r\n\r\n" + chunked([b"x"])[:-2])
    connection.send(
        b"\r\nGET /ping HTTP/1.1\r\n",
        *[lines[start : start + 500] for start in range(0, len(lines), 500)],
    )
    statuses = []
    while (answer := connection.answer()) is not None:
        statuses.append(answer.status)
    assert statuses in ([200, 431], [431], [])


@pytest.mark.parametrize("target", [b"/predictions/talker", b"/ping"])
def test_headers_at_the_size_limit_are_accepted(connect, target):
    minimal_request = request(target=target, headers=[(b"X-A", b"")], body=b"")
    connection = connect()
    for size in (2000, 2001):
        padding = b"b" * (size - len(minimal_request))
        connection.send(request(target=target, headers=[(b"X-A", padding)], body=b""))
        answer = connection.answer()
        if size == 2000:
            assert answer.status == 200
        else:
            check_refusal(answer, 431, "max_header_size")


def test_a_client_that_does_not_read_is_disconnected(start_server, until):
    size = 16 << 20
    with start_server(write_timeout=1, max_request_size=size, max_response_size=size) as server:
        server.register("talker.mar", initial_workers=1)
        with connect_raw(server) as connection:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            address = connection.sock.getsockname()
            connection.send(
                request(
                    target=b"/predictions/talker", headers=[(b"x-do", b"bytes")], body=bytes(size)
                )
            )
            process = psutil.Process()
            until(
                lambda: address not in [end.raddr for end in process.net_connections("tcp")]
            )  # the server's end of the connection
            answer = connection.answer()
        assert (answer.status, answer.complete) == (200, False)
        assert server.ask(b"next", x_do="bytes").text == "next"
