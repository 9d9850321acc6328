"""The server knows the clients of its relays as its own: their addresses, tokens and limits, and that they have gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.runtime.targets.frontends.test_answers import WITH, Served, connected_to, relays_of, serving
from tests.support.certificates import make_certificate
from tests.support.clients.rawhttp import Answer, RawConnection, chunked, request
from tests.support.logs import lines_of
from tests.support.models import make_model
from tsx_runtime.core.telemetry.tracing import Span, Tracer
from tsx_runtime.settings.schema import Settings

pytest.importorskip("cryptography")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("processes"),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a machine has no address but 127.0.0.1"),
]

GATED = """
def handle(data, context):
    if data is None:
        return None
    for row in data:
        body = bytes(row["body"])
        with open("%s", "ab") as log:
            log.write(body[:1])
        if body.startswith(b"/"):
            open(body).read()
    return ["done"] * len(data)
"""
TOKEN = (b"Authorization", b"Bearer right")
WRONG = (b"Authorization", b"Bearer wrong")
PREDICT = b"/predictions/gated"


@pytest.fixture(scope="module")
def spans() -> list[Span]:
    return []


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, spans: list[Span]) -> Iterator[Served]:
    """Its key and certificate are a keystore's."""
    store = tmp_path_factory.mktemp("relayed")
    pair = make_certificate(store)
    words = ["openssl", "pkcs12", "-export", "-in", pair.certificate, "-inkey", pair.key, "-out", store / "keys.p12"]
    subprocess.run([*words, "-passout", "pass:changeit"], check=True, capture_output=True, timeout=60)
    make_model(store / "gated.mar", GATED % (store / "handled"))
    settings = Settings(
        model_store=store,
        cache_dir=store / "cache",
        worker_preload=False,
        inference_address="https://127.0.0.1:0",
        keystore=store / "keys.p12",
        keystore_pass="changeit",
        inference_token="right",
        management_token="other",
        max_connections_per_client=6,
        max_requests_per_client=20,
        max_failed_tokens=2,
        access_log=True,
        log_format="text",
    )
    tracer = Tracer(0.0, lambda make: spans.extend(make()))
    with serving(settings, pair, ["gated"], (WITH,), tracer) as found:
        yield found


@pytest.fixture
def connect(served: Served) -> Iterator[Callable[[str], RawConnection]]:
    with ExitStack() as held:
        yield lambda source: held.enter_context(served.connect(source=source))


def ask(connection: RawConnection, *headers: tuple[bytes, bytes], body: bytes = b"x") -> Answer:
    connection.send(request(target=PREDICT, headers=headers, body=body))
    answer = connection.answer()
    assert answer is not None
    return answer


def test_a_client_has_its_connections_over_all_relays(connect: Callable[[str], RawConnection], until: Callable[..., None]) -> None:
    mine = [connect("127.0.0.2") for _ in range(6)]
    assert [ask(each, TOKEN).status for each in mine] == [200] * 6
    for _ in range(4):  # whichever relay accepts them
        answer = connect("127.0.0.2").answer()
        assert answer is not None
        assert answer.status == 429
        assert b"max_connections_per_client" in answer.body
    assert ask(connect("127.0.0.3"), TOKEN).status == 200
    mine[0].sock.close()
    until(lambda: ask(connect("127.0.0.2"), TOKEN).status == 200)


def test_a_client_opens_a_websocket_over_a_relay(connect: Callable[[str], RawConnection]) -> None:
    connection = connect("127.0.0.7")
    names = [(b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"), (b"Sec-WebSocket-Version", b"13")]
    connection.send(request(b"GET", PREDICT, [TOKEN, *names, (b"Sec-WebSocket-Key", b"AAAAAAAAAAAAAAAAAAAAAA==")]))
    answer = connection.answer()
    assert answer is not None
    assert answer.status == 101
    connection.send(bytes((0x82, 0x80 | 1, 0, 0, 0, 0)) + b"x")  # a frame's head with a mask that changes nothing, and its content
    received = b""
    while b'"status": 200' not in received:
        received += connection.sock.recv(4096) or pytest.fail(f"the server closed after {received!r}")
    assert b"done" in received


def test_a_clients_requests_and_wrong_tokens_are_its_own(connect: Callable[[str], RawConnection]) -> None:
    connections = [connect("127.0.0.4") for _ in range(4)]
    for connection in connections:
        connection.send(*[request(target=PREDICT, headers=[TOKEN], body=b"x")] * 10)
    statuses = [answer.status for each in connections for _ in range(10) if (answer := each.answer()) is not None]
    assert 20 <= statuses.count(200) < 40
    assert set(statuses) == {200, 429}

    wrong = connect("127.0.0.5")
    assert [ask(connect("127.0.0.5"), WRONG).status for _ in range(4)] == [400] * 4  # twice the number at once
    refused = ask(wrong, WRONG)
    assert refused.status == 429
    assert b"max_failed_tokens" in refused.body
    assert ask(wrong, TOKEN).status == 200
    assert ask(connect("127.0.0.6")).status == 400
    assert ask(connect("127.0.0.6"), WRONG).status == 400
    assert ask(connect("127.0.0.6"), TOKEN).status == 200


def test_spans_and_the_access_log_have_the_clients_address(
    connect: Callable[[str], RawConnection], spans: list[Span], until: Callable[..., None]
) -> None:
    connection = connect("127.0.0.7")
    port = connection.sock.getsockname()[1]
    trace = 0x0AF7651916CD43DD8448EB211C80319C
    parent = (b"traceparent", b"00-%032x-00f067aa0ba902b7-01" % trace)
    with lines_of("ACCESS_LOG") as lines:
        assert ask(connection, TOKEN, parent).status == 200
        connection.send(request(target=PREDICT, headers=[TOKEN, parent, (b"Transfer-Encoding", b"chunked")]) + chunked([b"x"]))
        answer = connection.answer()
        assert answer is not None
        assert answer.status == 200
        until(lambda: len(lines) >= 2)
    assert len([line for line in lines if f" - /127.0.0.7:{port} " in line]) == 2

    def found() -> list[Span]:
        return [span for span in spans if span.trace_id == trace and span.name == "POST /predictions/{model}"]

    until(lambda: len(found()) == 2)
    for span in found():
        wanted = {"client.address": "127.0.0.7", "client.port": port, "url.scheme": "https"}
        assert span.attributes.items() >= wanted.items()


def test_what_waits_for_the_clients_of_a_dead_relay_leaves_the_queue(
    served: Served, connect: Callable[[str], RawConnection], tmp_path: Path, until: Callable[..., None]
) -> None:
    version = served.registry.find("gated", "1.0")
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    alive, dead = relays_of(os.getpid())

    def waiting_at(relay: psutil.Process, source: str) -> list[RawConnection]:
        connections = connected_to(relay, os.getpid(), lambda: connect(source), 4)
        for each in connections:
            each.send(request(target=PREDICT, headers=[TOKEN], body=b"w"))
        return connections

    (held,) = connected_to(alive, os.getpid(), lambda: connect("127.0.0.8"), 1)
    held.send(request(target=PREDICT, headers=[TOKEN], body=os.fsencode(gate)))
    with open(gate, "w") as opened:
        waiting_at(dead, "127.0.0.9")
        left = waiting_at(alive, "127.0.0.10")
        until(lambda: version.in_flight == 1 + 8)
        dead.kill()
        until(lambda: version.in_flight <= 1 + 4 + 1)  # the worker may have had one that waits, besides the one that it runs
        opened.write("go on")
    for connection in (held, *left):
        answer = connection.answer()
        assert answer is not None
        assert answer.body == b"done"
    handled = (served.registry.settings.model_store / "handled").read_bytes()
    assert handled.count(b"w") <= len(left) + 1
    until(lambda: len([each for each in relays_of(os.getpid()) if each != dead]) == 2)
    assert ask(connect("127.0.0.11"), TOKEN).status == 200
    assert alive.is_running()
