"""The open-loop generator against servers whose behaviour is known: what it counts, and where its clock starts."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import openloop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the generator waits by epoll")

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
FAILED = b"HTTP/1.1 500 Internal Server Error\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx"

Answer = Callable[[int], list[bytes] | None]


@contextmanager
def server(answer: Answer, body: int = 0) -> Iterator[str]:
    """Answers the n-th request with `answer(n)`, piece by piece; None closes the connection, no piece leaves the request without answer."""
    loop, ready, count = asyncio.new_event_loop(), threading.Event(), iter(range(10**9))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(body)
                pieces = answer(next(count))
                for piece in pieces or ():
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if pieces is None or FAILED in pieces:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def main() -> None:
        nonlocal port
        listening = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=100)
        port = listening.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        listening.close()

    port, stop = 0, asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{port}/predictions/m"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def ends(result: openloop.Result) -> int:
    return result.accepted + result.refused + sum(result.errors.values()) + result.unanswered + result.unsent


@given(rate=st.floats(1, 5000), seconds=st.floats(0.1, 3), poisson=st.booleans())
def test_a_plan_rises_within_its_seconds_and_has_about_as_many_requests_as_asked(rate: float, seconds: float, poisson: bool) -> None:
    due = openloop.plan(rate, seconds, poisson)
    assert list(due) == sorted(due)
    assert all(0 <= moment < seconds for moment in due)
    spread = 6 * (rate * seconds) ** 0.5 if poisson else 1
    assert abs(len(due) - rate * seconds) <= spread + 1


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([50.0, 90.0, 99.0, 99.9]))
def test_a_percentile_is_the_least_value_that_covers_its_share(values: list[float], which: float) -> None:
    ordered = sorted(values)
    value = openloop.percentile(ordered, which)
    assert sum(other <= value for other in ordered) * 100 >= which * len(ordered) - 1e-6
    assert sum(other < value for other in ordered) * 100 < which * len(ordered)


def test_no_percentile_of_nothing() -> None:
    assert openloop.percentile([], 99) == 0


@pytest.mark.parametrize("answer", [OK, BUSY, FAILED, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nOK\r\n0\r\n\r\n"])
def test_the_length_of_an_answer_is_known_once_all_of_it_is_there(answer: bytes) -> None:
    for cut in range(len(answer)):
        length = openloop.answer_length(answer[:cut])
        assert length is None or length > cut
    assert openloop.answer_length(answer) == len(answer) == openloop.answer_length(bytearray(answer))


@pytest.mark.parametrize("poisson", [False, True])
def test_every_planned_request_has_one_end_whatever_the_server_answers(poisson: bool) -> None:
    kinds: list[list[bytes] | None] = [[OK], [BUSY], [FAILED], None, [OK[:20], OK[20:]]]
    with server(lambda number: kinds[number % 5], body=7) as url:
        result = openloop.run(url, 500, 0.4, 40, b'{"x":1}', poisson=poisson, headers=["X-Name: y"])
    assert ends(result) == result.planned
    share = (result.planned - result.unsent) // 5
    assert result.refused in (share, share + 1)
    assert result.errors.keys() == {"500", "closed"}
    assert result.accepted >= 2 * share


def test_what_finds_no_connection_is_unsent_and_what_has_no_answer_unanswered() -> None:
    with server(lambda number: [OK] if number < 10 else []) as url:
        result = openloop.run(url, 200, 0.3, 4, b"", grace=0)
    assert (result.accepted, result.unanswered, result.unsent) == (10, 4, 46)
    assert ends(result) == result.planned == 60


def test_latency_counts_from_the_planned_time_also_when_no_connection_was_free() -> None:
    """One connection, and its first answer takes until the fifth request: each of those behind it waited its part."""
    held = threading.Event()

    def answer(number: int) -> list[bytes]:
        if number == 0:
            held.wait(0.25)
        return [OK]

    with server(answer) as url:
        result = openloop.run(url, 20, 0.25, 1, b"")
    assert result.accepted + result.unsent == result.planned == 5
    assert result.most >= 250
    assert result.waited + result.unsent >= 3


def test_large_bodies_leave_whole() -> None:
    with server(lambda _: [OK], body=3_000_000) as url:
        result = openloop.run(url, 20, 0.3, 6, bytes(3_000_000))
    assert (result.accepted, result.errors) == (6, {})


def test_a_server_that_goes_away_leaves_the_rest_unsent() -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def accept_and_go() -> None:
        with listening:
            connections = [listening.accept()[0] for _ in range(2)]
            connections[0].recv(10)
        for connection in connections:
            connection.close()

    thread = threading.Thread(target=accept_and_go)
    thread.start()
    result = openloop.run(f"http://127.0.0.1:{listening.getsockname()[1]}/", 100, 0.2, 2, b"")
    thread.join(30)
    assert result.accepted == 0
    assert set(result.errors) == {"closed"}
    assert ends(result) == result.planned == 20
    assert result.unsent >= 18


@pytest.mark.parametrize(
    ("cpu", "starved", "late", "p99", "limited"),
    [
        (0.5, 0.1, 0.2, 1, False),
        (0.95, 0, 0.2, 1, True),
        (0.5, 0.45, 0.2, 1, True),
        (0.5, 0, 3, 5, True),
        (0.5, 0, 3, 500, False),
        (0.5, 0, 0.5, 0.6, False),
    ],
)
def test_the_generator_says_when_it_is_the_limit(cpu: float, starved: float, late: float, p99: float, limited: bool) -> None:
    assert (openloop.limit(cpu, starved, late, p99) is not None) == limited
