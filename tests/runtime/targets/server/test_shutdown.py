"""A stop while connections are in every state that they can be in: what was accepted is answered,
the rest is let go.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.clients.rawhttp import RawConnection, chunked, request
from tests.support.models import make_model
from tests.support.servers import DEADLINE, FREE_PORTS, Running, serving

pytestmark = pytest.mark.usefixtures("processes")

HANDLER = """
import time
from pathlib import Path

def handle(data, context):
    return None if data is None else [act(index, bytes(row["body"]).decode(), context) for index, row in enumerate(data)]

def act(index, word, context):
    kind, _, file = word.partition(" ")
    if kind == "stream":
        from ts.handler_utils.utils import send_intermediate_predict_response

        send_intermediate_predict_response(["a"], {index: context.get_request_id(index)}, "Intermediate", 200, context)
    if file:
        Path(file + ".begun").touch()
        deadline = time.monotonic() + 60  # a test that failed must not hold the worker
        while not Path(file).exists() and time.monotonic() < deadline:
            time.sleep(0.005)
    return "done"
"""
PREDICT = b"/predictions/patient"
STREAM = [(b"Content-Type", b"application/octet-stream")]


def predict(word: str) -> bytes:
    return request(target=PREDICT, headers=STREAM, body=word.encode())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    make_model(tmp_path / "patient", HANDLER)
    with ExitStack() as held:

        def start(**settings: object) -> Running:
            words = [
                f"--set={name}={value}"
                for name, value in {"worker_preload": "false", **settings}.items()
            ]
            environment = {"TSX_CACHE_DIR": str(tmp_path / "cache")}
            return held.enter_context(
                serving(["serve", "patient", *FREE_PORTS, *words], tmp_path, environment)
            )

        yield start


@pytest.fixture
def connect() -> Iterator[Callable[[Running], RawConnection]]:
    with ExitStack() as held:

        def connect(server: Running) -> RawConnection:
            host, _, port = server.address("predictions").removeprefix("http://").partition(":")
            return held.enter_context(RawConnection((host, int(port))))

        yield connect


def wait_for(path: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not path.exists():  # a handler has no other way to tell
        assert time.monotonic() < end
        time.sleep(0.005)


def settle(connection: RawConnection) -> None:
    """The server has read what this connection sent before: another's request, sent later, is
    answered.
    """
    connection.send(request(b"GET", b"/ping"))
    answer = connection.answer(b"GET")
    assert answer is not None
    assert answer.status == 200


def stop(server: Running, idle: RawConnection) -> None:
    """Returns when the server has turned to its connections: then it closes those that wait for
    nothing.
    """
    server.process.send_signal(signal.SIGTERM)
    assert idle.answer() is None


def test_connections_that_wait_for_nothing_are_closed_at_once(start, connect):
    server = start()
    silent, predicted, pinged, half_a_head = (connect(server) for _ in range(4))
    predicted.send(predict("now"))
    assert predicted.answer().body == b"done"
    half_a_head.send(b"POST /predictions/patient HTTP/1.1\r\nHost:")
    settle(pinged)
    server.process.send_signal(signal.SIGTERM)
    assert [connection.answer() for connection in (silent, predicted, pinged, half_a_head)] == [
        None
    ] * 4
    assert server.process.wait(DEADLINE) == 0


def test_requests_under_way_are_answered_on_connections_that_are_then_closed(
    start, connect, tmp_path
):
    server = start()
    idle, first, queued, chunks, ahead = (connect(server) for _ in range(5))
    go = tmp_path / "go"
    first.send(predict(f"wait {go}"))
    wait_for(tmp_path / "go.begun")
    queued.send(predict("next"))
    chunks.send(
        request(target=PREDICT, headers=[*STREAM, (b"Transfer-Encoding", b"chunked")])
        + chunked([b"ne", b"xt"])
    )
    ahead.send(predict("one") + predict("two"))
    settle(idle)
    stop(server, idle)
    go.touch()
    for connection in (first, queued, chunks, ahead):
        answer = connection.answer()
        assert (answer.status, answer.body, answer.header(b"connection")) == (
            200,
            b"done",
            b"close",
        )
        assert (
            connection.answer() is None
        )  # of what was sent ahead, nothing had begun: its client may send it elsewhere
    assert server.process.wait(DEADLINE) == 0
    assert "Traceback" not in server.log


def test_a_request_of_which_half_has_come_is_taken_to_its_end(start, connect):
    server = start()
    idle, plain, chunks = (connect(server) for _ in range(3))
    whole = predict("halves")
    plain.send(whole[:-4])
    chunks.send(
        request(target=PREDICT, headers=[*STREAM, (b"Transfer-Encoding", b"chunked")])
        + b"4\r\nhalf\r\n"
    )
    settle(idle)
    stop(server, idle)
    plain.send(whole[-4:])
    chunks.send(b"0\r\n\r\n")
    for connection in (plain, chunks):
        answer = connection.answer()
        assert (answer.status, answer.body, answer.header(b"connection")) == (
            200,
            b"done",
            b"close",
        )
        assert connection.answer() is None
    assert server.process.wait(DEADLINE) == 0


def test_a_request_whose_other_half_never_comes_holds_the_server_no_longer_than_its_time(
    start, connect
):
    server = start(body_timeout=1)
    idle, half = connect(server), connect(server)
    half.send(predict("halves")[:-4])
    settle(idle)
    stop(server, idle)
    answer = half.answer()
    assert answer is None or answer.status == 408
    assert server.process.wait(DEADLINE) == 0
    assert "Traceback" not in server.log


def test_a_stream_goes_on_to_its_end(start, connect, tmp_path):
    server = start()
    idle, stream = connect(server), connect(server)
    go = tmp_path / "go"
    stream.send(predict(f"stream {go}"))
    wait_for(tmp_path / "go.begun")
    settle(idle)
    stop(server, idle)
    go.touch()
    answer = stream.answer()
    assert (answer.status, answer.body, answer.whole) == (200, b"adone", True)
    assert stream.answer() is None
    assert server.process.wait(DEADLINE) == 0


def test_who_neither_reads_nor_sends_the_rest_of_a_request_holds_the_server_no_longer_than_drain_timeout(
    start, connect, tmp_path
):
    make_model(
        tmp_path / "large",
        "def handle(data, context):\n    return [b'x' * 6_000_000] * len(data or [])\n",
        name="patient",
    )
    (tmp_path / "patient").rename(tmp_path / "small")
    (tmp_path / "large").rename(tmp_path / "patient")
    server = start(drain_timeout=1)
    idle, half, deaf = (connect(server) for _ in range(3))
    half.send(predict("halves")[:-4])
    deaf.send(predict("all of it"))
    assert deaf.sock.recv(12) == b"HTTP/1.1 200"
    settle(idle)
    stop(server, idle)
    answer = half.answer()
    assert answer is None or answer.status == 408
    assert server.process.wait(DEADLINE) == 0
    assert "Traceback" not in server.log
