"""Relays as processes: they die, stop, are replaced, and end with their server, while clients go on."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.runtime.targets.frontends.test_answers import TlsRawConnection, connected_to, relays_of
from tests.support.certificates import Pair, make_certificate
from tests.support.clients.rawhttp import RawConnection, request
from tests.support.models import make_model
from tests.support.servers import DEADLINE, Running, environment_of, serving

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]

HANDLER = """
def handle(data, context):
    if data is None:
        return None
    for row in data:
        if bytes(row["body"]).startswith(b"/"):
            open(bytes(row["body"])).read()
    return [%r] * len(data)
"""


class Place:
    """Servers of one https address, one after the other."""

    def __init__(self, place: Path, ports: list[int], pair: Pair, held: ExitStack) -> None:
        self.place, self.ports, self.held = place, ports, held
        self.pair = pair
        self.trust = ssl.create_default_context(cafile=pair.certificate)

    def start(self, answer: str, *more: str) -> Running:
        make_model(self.place / answer / "echo", HANDLER % answer)
        settings = {
            "inference_address": f"https://127.0.0.1:{self.ports[0]}",
            "management_address": f"http://127.0.0.1:{self.ports[1]}",
            "metrics_address": f"http://127.0.0.1:{self.ports[1]}",
            "certificate_file": self.pair.certificate,
            "private_key_file": self.pair.key,
            "disable_token_authorization": "true",
            "state_dir": self.place / "state",
            "cache_dir": self.place / "cache",
            "frontends": 2,
            "access_log": "true",
        }
        words = ["serve", self.place / answer / "echo", *more, *(f"--set={name}={value}" for name, value in settings.items())]
        return self.held.enter_context(serving(words, self.place / answer, {"TSX_MANAGEMENT_TOKEN": "secret"}))

    def connect(self) -> RawConnection:
        return self.held.enter_context(TlsRawConnection(("127.0.0.1", self.ports[0]), self.trust))

    def ask(self, connection: RawConnection, body: bytes = b"x") -> bytes | None:
        connection.send(request(target=b"/predictions/echo", body=body))
        answer = connection.answer()
        return None if answer is None else answer.body

    def new(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.ports[0], timeout=DEADLINE, context=self.trust)


class Load(threading.Thread):
    """Requests one after the other, over a connection that is kept or over one each, and what came of them."""

    def __init__(self, place: Place, *, keep: bool) -> None:
        super().__init__()
        self.place, self.keep = place, keep
        self.outcomes: Counter[str] = Counter()
        self.over = threading.Event()

    def run(self) -> None:
        connection = None
        while not self.over.wait(0.002):
            try:
                connection = connection or self.place.new()
                connection.request("POST", "/predictions/echo", b"x")
                answer = connection.getresponse()
                self.outcomes[f"{answer.status} {answer.read().decode()}"] += 1
            except (OSError, http.client.HTTPException) as error:
                self.outcomes[repr(error)] += 1
                connection = None
            if not self.keep and connection is not None:
                connection.close()
                connection = None

    @property
    def failed(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if not outcome.startswith("200 "))


@pytest.fixture
def loads() -> Iterator[list[Load]]:
    loads: list[Load] = []
    yield loads
    for load in loads:
        load.over.set()
        load.join(DEADLINE)


@pytest.fixture
def place(processes: None, short_path: Path, free_ports: Callable[[int], list[int]]) -> Iterator[Place]:
    with ExitStack() as held:
        yield Place(short_path, free_ports(2), make_certificate(short_path), held)


def test_a_relay_that_is_killed_is_followed_by_another_one_and_a_stop_answers_what_was_accepted(
    place: Place, loads: list[Load], until: Callable[[Callable[[], object]], None]
) -> None:
    server = place.start("old")
    ours = relays_of(server.process.pid)
    assert len(ours) == 2
    assert all("TSX_MANAGEMENT_TOKEN" not in environment_of(each.pid) for each in ours)
    gate = place.place / "gate"
    os.mkfifo(gate)

    lost, left = (connected_to(relay, server.process.pid, place.connect, 4) for relay in ours)
    for connection in (*lost, *left):
        assert place.ask(connection) == b"old"
    loads += [Load(place, keep=keep) for keep in (True, True, False, False)]
    for load in loads:
        load.start()
    until(lambda: all(load.outcomes["200 old"] > 5 for load in loads))
    ours[0].send_signal(signal.SIGKILL)
    until(lambda: len(relays_of(server.process.pid)) == 2 and ours[0].pid not in {each.pid for each in relays_of(server.process.pid)})
    until(lambda: "a relay ended (exit code -9)" in server.log)
    before = [sum(load.outcomes.values()) for load in loads]
    until(lambda: all(sum(load.outcomes.values()) > count + 20 for load, count in zip(loads, before, strict=True)))
    for load in loads:
        load.over.set()
        load.join(DEADLINE)
    assert all(load.failed <= 2 for load in loads)  # the request under way, and one on a connection that has just ended
    assert [place.ask(connection) for connection in lost] == [None] * 4
    assert [place.ask(connection) for connection in left] == [b"old"] * 4

    # Who asks is known by his address, not by the relay's.
    port = left[0].sock.getsockname()[1]
    until(lambda: f"127.0.0.1:{port}" in server.log)

    # A stop: the request that the worker has is answered, new connections are refused, and all processes end.
    left[0].send(request(target=b"/predictions/echo", body=os.fsencode(gate)))
    with open(gate, "w") as opened:
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refused(place))
        processes = relays_of(server.process.pid)
        assert len(processes) == 2
        opened.write("go on")
    answer = left[0].answer()
    assert answer is not None
    assert answer.body == b"old"
    assert left[0].answer() is None
    assert server.process.wait(DEADLINE) == 0
    assert not any(each.is_running() for each in processes)
    assert "Traceback" not in server.log


def refused(place: Place) -> bool:
    try:
        place.new().connect()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def test_a_server_with_relays_is_replaced_under_load_and_they_end_with_a_server_that_is_killed(
    place: Place, loads: list[Load], until: Callable[[Callable[[], object]], None]
) -> None:
    old = place.start("old")
    idle = place.connect()
    assert place.ask(idle) == b"old"
    loads += [Load(place, keep=keep) for keep in (True, True, False, False)]
    for load in loads:
        load.start()
    new = place.start("new", "--replace")
    assert place.ask(idle) == b"old"  # the one request that a connection of the old server still has
    assert idle.answer() is None
    assert old.process.wait(DEADLINE) == 0
    until(lambda: all(load.outcomes["200 new"] >= 5 for load in loads))
    for load in loads:
        load.over.set()
        load.join(DEADLINE)
    assert {outcome for load in loads for outcome in load.outcomes} == {"200 old", "200 new"}
    assert "Traceback" not in old.log

    processes = relays_of(new.process.pid)
    assert len(processes) == 2
    new.process.send_signal(signal.SIGKILL)
    until(partial(all_ended, processes))
    assert refused(place)


def all_ended(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)
