"""The budget of bytes under way, over real sockets: who is refused, what is given back, and the
bodies that stop coming.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.runtime.conftest import RunningServer
from tests.support.clients.rawhttp import Answer, RawConnection, chunked, request
from tsx_runtime.errors import NoRoom

LARGE = 1_000_000
PATH = b"/predictions/talker"
BYTES = (b"x-do", b"bytes")


@pytest.fixture(scope="module")
def tight(start_server: Callable[..., object]) -> Iterator[RunningServer]:
    """There is room for one large body, and a half of a second one."""
    values = {
        "max_request_size": LARGE,
        "max_response_size": LARGE,
        "max_inflight_bytes": 1,
        "job_queue_size": 8,
    }
    with start_server(**values, body_idle_timeout=1, write_timeout=2) as server:  # type: ignore[attr-defined]
        server.register("talker.mar", initial_workers=1)
        yield server


@pytest.fixture
def connect(tight: RunningServer) -> Iterator[Callable[[], RawConnection]]:
    made: list[RawConnection] = []
    parts = urlsplit(tight.addresses["inference"])

    def connect() -> RawConnection:
        made.append(
            RawConnection((parts.hostname or "", parts.port or 0), lambda: tight.call(lambda: None))
        )
        return made[-1]

    yield connect
    for connection in made:
        connection.__exit__()


def used(server: RunningServer) -> int:
    number: int = server.call(lambda: server.registry.bytes_in_flight.used)
    return number


def begin(
    lane: str,
    size: int,
    *,
    whole: bool = False,
    headers: tuple[tuple[bytes, bytes], ...] = (BYTES,),
) -> bytes:
    """A request for so many bytes, of which one is missing, or none."""
    if lane == "fast":
        return request(target=PATH, headers=headers, body=bytes(size))[: None if whole else -1]
    sent = request(target=PATH, headers=[*headers, (b"Transfer-Encoding", b"chunked")]) + chunked(
        [bytes(size)]
    )
    return sent if whole else sent[:-8]


def check_refusal(answer: Answer | None) -> None:
    assert answer is not None
    assert (answer.status, answer.header(b"retry-after")) == (503, b"1")
    assert "max_inflight_bytes" in json.loads(answer.body)["message"]


LANES = ("fast", "other")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("other", LANES)
def test_bodies_that_do_not_fit_are_refused_until_others_have_gone_and_small_ones_pass(
    lane: str,
    other: str,
    tight: RunningServer,
    connect: Callable[[], RawConnection],
    until: Callable[[Callable[[], object]], None],
) -> None:
    first, second = connect(), connect()
    first.send(begin(lane, LARGE))
    until(lambda: used(tight) >= LARGE - 70_000)
    second.send(begin(other, LARGE))
    refused = second.answer()
    check_refusal(refused)
    assert refused is not None
    assert refused.header(b"connection") == b"close"
    assert tight.ask(b"small", x_do="bytes").content == b"small"
    first.sock.close()
    until(lambda: used(tight) == 0)
    second.sock.close()
    third = connect()
    third.send(begin(other, LARGE, whole=True))
    answer = third.answer()
    assert answer is not None
    assert (answer.status, len(answer.body)) == (200, LARGE)
    until(lambda: used(tight) == 0)


@pytest.mark.parametrize("lane", LANES)
def test_what_was_refused_when_all_of_it_was_there_leaves_its_connection_open(
    lane: str, tight: RunningServer, connect: Callable[[], RawConnection]
) -> None:
    budget = tight.registry.bytes_in_flight
    connection = connect()
    tight.call(lambda: budget.take(budget.limit - budget.limit // 8))
    connection.send(begin(lane, 70_000, whole=True))
    answer = connection.answer()
    tight.call(lambda: budget.give(budget.limit - budget.limit // 8))
    check_refusal(answer)
    connection.send(begin(lane, 70_000, whole=True))
    answer = connection.answer()
    if answer is None:  # it came in pieces, and was refused at the first
        return
    assert (answer.status, len(answer.body)) == (200, 70_000)


@pytest.mark.parametrize("lane", LANES)
def test_a_body_that_stops_coming_is_answered_408_and_gives_back_what_came(
    lane: str,
    tight: RunningServer,
    connect: Callable[[], RawConnection],
    until: Callable[[Callable[[], object]], None],
) -> None:
    connection = connect()
    connection.send(begin(lane, LARGE))
    answer = connection.answer()
    assert answer is not None
    assert answer.status == 408
    assert "body_idle_timeout" in json.loads(answer.body)["message"]
    assert connection.answer() is None
    until(lambda: used(tight) == 0)


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
def test_nothing_stays_taken_whatever_becomes_of_a_request(
    ending: str,
    lane: str,
    tight: RunningServer,
    connect: Callable[[], RawConnection],
    until: Callable[[Callable[[], object]], None],
    tmp_path: Path,
) -> None:
    go, size = tmp_path / "go", 300_000
    wait = request(target=PATH, headers=[(b"x-do", b"wait"), (b"x-file", bytes(go))], body=b"")
    blocked, connection = connect(), connect()
    version = tight.registry.find("talker", None)
    until(lambda: version.ready)
    if ending == "left in the body":
        connection.send(begin(lane, size))
        until(lambda: used(tight) > 0)
        connection.sock.close()
    elif ending.startswith("left"):
        if ending == "left while queued":
            blocked.send(wait)
            until(lambda: version.in_flight - version.pending == 1)
        headers = (b"x-do", b"wait"), (b"x-file", bytes(go))
        connection.send(begin(lane, size, whole=True, headers=headers))
        until(lambda: version.in_flight == 1 + (ending == "left while queued"))
        assert used(tight) >= size
        connection.sock.close()
    elif ending == "refused late":
        connection.send(begin(lane, size))
        tight.call(lambda: tight.registry.unregister("talker"))
        connection.send(b"\0" if lane == "fast" else begin(lane, size, whole=True)[-8:])
        answer = connection.answer()
        tight.register("talker.mar", initial_workers=1)
        assert answer is not None
        assert answer.status == 404
    else:
        word = {"answered": b"bytes"}.get(ending, ending.encode())
        connection.send(begin(lane, size, whole=True, headers=((b"x-do", word),)))
        assert connection.answer() is not None
    go.touch()
    until(lambda: used(tight) == 0)


@pytest.mark.parametrize("lane", LANES)
def test_answers_that_nobody_reads_count_and_the_largest_readers_are_cut_off(
    lane: str, tight: RunningServer, until: Callable[[Callable[[], object]], None]
) -> None:
    budget = tight.registry.bytes_in_flight
    before = budget.cut_off
    readers: list[socket.socket] = []
    parts = urlsplit(tight.addresses["inference"])
    for _ in range(4):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((parts.hostname, parts.port))
        readers.append(sock)
    try:
        seen = 0
        for sock in readers * 12:  # what the kernel takes of answers is not the server's
            try:
                sock.sendall(begin(lane, 500_000, whole=True))
            except OSError:
                break
            until(lambda: used(tight) == tight.call(lambda: budget.unread))
            seen = max(seen, budget.unread)
            if budget.cut_off > before:
                break
        assert seen
        assert budget.cut_off > before
        assert used(tight) <= budget.limit
        assert tight.ask(b"small", x_do="bytes").content == b"small"
    finally:
        for sock in readers:
            sock.close()
    until(lambda: used(tight) == 0)


def test_metrics_tell_what_is_taken(tight: RunningServer) -> None:
    budget = tight.registry.bytes_in_flight
    tight.call(lambda: budget.take(123))
    with pytest.raises(NoRoom):
        tight.call(lambda: budget.take(budget.limit))
    text = tight.metrics.get("/metrics").text
    tight.call(lambda: budget.give(123))
    lines = {
        line.split("{")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("tsx_")
    }
    assert lines["tsx_bytes_in_flight"] == 123
    assert lines["tsx_unread_bytes"] == 0
    assert lines["tsx_bodies_refused_total"] == budget.refused > 0
    assert lines["tsx_clients_cut_off_total"] == budget.cut_off
