"""Clients that are slow or say too much, over raw sockets, on both ways through the server: the
fast lane and FastAPI.
"""

from __future__ import annotations

import json
import socket

import psutil
import pytest

from tests.support.clients.rawhttp import Answer, RawConnection, chunked, request

PREDICT = b"POST /predictions/talker HTTP/1.1\r\nHost: 127.0.0.1\r\n"
DONE = PREDICT + b"Content-Length: 1\r\n\r\nx"
PING = b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture(scope="module")
def impatient(start_server):
    """All that can wait waits for a second."""
    with start_server(
        header_timeout=1, body_timeout=1, keep_alive_timeout=1, max_header_size=2000
    ) as server:
        server.register("talker.mar", initial_workers=1)
        yield server


@pytest.fixture
def connect(impatient):
    connections = []

    def connect(role: str = "inference") -> RawConnection:
        host, _, port = impatient.addresses[role].removeprefix("http://").partition(":")
        connections.append(RawConnection((host, int(port)), lambda: impatient.call(lambda: None)))
        return connections[-1]

    yield connect
    for connection in connections:
        connection.__exit__()


def check_refusal(answer: Answer | None, status: int, setting: str) -> None:
    assert answer is not None
    assert answer.status == status
    assert answer.header(b"connection") == b"close"
    assert answer.header(b"content-type") == b"application/json"
    body = json.loads(answer.body)
    assert body["code"] == status
    assert setting in body["message"]


def test_headers_that_do_not_come_to_an_end_are_answered_408(connect):
    slow = []
    for before in (b"", DONE, PING):
        for begun in (b"P", PREDICT, PREDICT + b"X-A: b", b"GET /ping HTTP/1.1\r\n"):
            connection = connect()
            connection.send(before)
            if before:
                assert connection.answer().status == 200
            connection.send(begun)
            slow.append(connection)
    for connection in slow:
        check_refusal(connection.answer(), 408, "header_timeout")
        assert connection.answer() is None


def test_a_body_that_does_not_come_is_answered_408(connect):
    slow = []
    for begun in (
        b"Content-Length: 10\r\n\r\n",
        b"Content-Length: 10\r\n\r\nabc",
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
    ):
        connection = connect()
        connection.send(PREDICT + begun)
        if b"Expect" in begun:
            assert connection.answer().status == 100
        slow.append(connection)
    for connection in slow:
        check_refusal(connection.answer(), 408, "body_timeout")
        assert connection.answer() is None


TOO_LARGE = {
    "announced": b"Content-Length: 100001\r\n\r\nx",
    "chunked": b"Transfer-Encoding: chunked\r\n\r\n" + chunked([bytes(100_001)])[:-5],
}


HEADS = {
    "inference": PREDICT,
    "management": b"POST /models HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n",
}


def test_who_is_answered_while_a_body_is_still_coming_gets_no_second_answer(connect):
    """Closed after body_timeout: all of them wait at the same time."""
    unknown = connect()
    unknown.send(
        b"POST /predictions/nobody HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
    )
    assert unknown.answer().status == 404
    refused = []
    for role, head in HEADS.items():
        for body in TOO_LARGE.values():
            connection = connect(role)
            connection.send(head + body)
            check_refusal(connection.answer(), 413, "max_request_size")
            refused.append(connection)
    assert [connection.answer() for connection in (unknown, *refused)] == [None] * 5


@pytest.mark.parametrize("role", ["inference", "management"])
def test_who_sends_all_of_a_body_over_the_limit_before_reading_gets_the_refusal(connect, role):
    connection = connect(role)
    connection.send(HEADS[role] + b"Content-Length: 30000000\r\n\r\n" + bytes(30_000_000))
    check_refusal(connection.answer(), 413, "max_request_size")
    assert connection.answer() is None


def test_a_body_that_goes_on_may_take_its_time(connect):
    """A second for each 16 KiB is what body_timeout leaves to a slow line."""
    connection = connect()
    connection.send(PREDICT + b"Content-Length: 60001\r\n\r\n" + b"x" * 60_000)
    other = connect()
    other.send(PREDICT + b"Content-Length: 10\r\n\r\n")
    check_refusal(other.answer(), 408, "body_timeout")  # two ticks later the first is still welcome
    connection.send(b"x")
    assert connection.answer().status == 200


def test_a_connection_that_waits_for_nothing_is_closed(connect):
    waiting = []
    for before in (b"", DONE, DONE + b"\r\n", PING):
        connection = connect()
        waiting.append(connection)
        connection.send(before)
        if before:
            assert connection.answer().status == 200
            connection.send(
                b"\r", b"\n"
            )  # old clients end a body so: nothing that would be the begin of a request
    assert [connection.answer() for connection in waiting] == [None] * 4


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
        sent = request(target=target, headers=headers, body=b"x")
        connection.send(*([sent[:1500], sent[1500:2500]] if kind == "no end" else [sent]))
    check_refusal(connection.answer(), 431, "max_header_size")
    assert connection.answer() is None


def test_headers_behind_a_request_that_fastapi_reads_are_bounded_as_well(connect):
    connection = connect()
    gone_on = b"".join(b"X-%d: %b\r\n" % (number, b"b" * 90) for number in range(200))
    first = PREDICT + b"Transfer-Encoding: chunked\r\n\r\n" + chunked([b"x"])[:-2]
    connection.send(first)
    connection.send(
        b"\r\nGET /ping HTTP/1.1\r\n",
        *[gone_on[at : at + 500] for at in range(0, len(gone_on), 500)],
    )
    statuses = []
    while (answer := connection.answer()) is not None:
        statuses.append(answer.status)
    assert statuses in ([200, 431], [431], [])


def test_headers_of_just_the_right_size_pass(connect):
    for target in (b"/predictions/talker", b"/ping"):
        bare = request(target=target, headers=[(b"X-A", b"")], body=b"")
        connection = connect()
        connection.send(
            request(target=target, headers=[(b"X-A", b"b" * (2000 - len(bare)))], body=b"")
        )
        assert connection.answer().status == 200
        connection.send(
            request(target=target, headers=[(b"X-A", b"b" * (2001 - len(bare)))], body=b"")
        )
        check_refusal(connection.answer(), 431, "max_header_size")


def test_a_client_that_takes_nothing_of_its_answer_loses_its_connection(start_server, until):
    size = 16 << 20
    with start_server(write_timeout=1, max_request_size=size, max_response_size=size) as server:
        server.register("talker.mar", initial_workers=1)
        host, _, port = server.addresses["inference"].removeprefix("http://").partition(":")
        with RawConnection((host, int(port))) as connection:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            own = connection.sock.getsockname()
            connection.send(
                request(
                    target=b"/predictions/talker", headers=[(b"x-do", b"bytes")], body=bytes(size)
                )
            )
            until(
                lambda: own not in [each.raddr for each in psutil.Process().net_connections("tcp")]
            )  # the server's end
            answer = connection.answer()
        assert (answer.status, answer.complete) == (200, False)
        assert (
            server.inference.post(
                "/predictions/talker", content=b"next", headers={"x-do": "bytes"}
            ).text
            == "next"
        )


def test_who_is_slow_costs_nobody_else_anything(connect, impatient):
    slow = [connect() for _ in range(50)]
    for connection in slow:
        connection.send(PREDICT)
    assert impatient.inference.post("/predictions/talker", content="x").status_code == 200
    for connection in slow:
        check_refusal(connection.answer(), 408, "header_timeout")
