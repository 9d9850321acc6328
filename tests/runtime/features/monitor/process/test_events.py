"""Samples reach a real HTTP server as CloudEvents, and a failing receiver costs nothing else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.servers import DEADLINE, FreePorts
from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.process import events
from tsx_runtime.features.monitor.process.events import EventSender, events_of

SAMPLE = MonitorSample(
    model="digits",
    version="2.0",
    request_id="77ab",
    at=1_763_723_123.25,
    seconds=0.5,
    status=200,
    headers={"content-type": "image/png"},
    answer_type="application/json",
    body=b"\x89PNG",
    answer=b"[0.9]",
)
Received = tuple[dict[str, str], bytes]


class Receiver:
    """A server that collects events; `status` is its answer, and `gate` lets it answer."""

    def __init__(self) -> None:
        self.received: queue.Queue[Received] = queue.Queue()
        self.status = 200
        self.is_endless = False
        self.gate = threading.Event()
        self.gate.set()
        self.connections: set[int] = set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                receiver.connections.add(self.client_address[1])
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.gate.wait(DEADLINE)
                receiver.received.put((headers, body))
                self.send_response(receiver.status)
                self.send_header("content-length", str(1 << 40) if receiver.is_endless else "0")
                self.end_headers()
                with suppress(OSError):
                    while receiver.is_endless:
                        self.wfile.write(b" " * 65536)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MIN_PAUSE_S", 0.0)


def test_a_sample_is_two_events_with_one_id(receiver: Receiver) -> None:
    sender = EventSender(receiver.url)
    for _ in range(3):
        sender.send(SAMPLE)
    sender.close(DEADLINE)
    received = [receiver.received.get_nowait() for _ in range(6)]
    (request, body), (response, answer) = received[:2]
    ce = {name: value for name, value in request.items() if name.startswith("ce-")}
    assert ce == {
        "ce-specversion": "1.0",
        "ce-id": "77ab",
        "ce-source": "tsx",
        "ce-type": "org.kubeflow.serving.inference.request",
        "ce-time": "2025-11-21T11:05:23.250000Z",
        "ce-inferenceservicename": "digits",
        "ce-modelversion": "2.0",
    }
    assert (request["content-type"], body) == ("image/png", b"\x89PNG")
    assert response["ce-type"] == "org.kubeflow.serving.inference.response"
    assert (response["ce-id"], response["ce-time"]) == ("77ab", "2025-11-21T11:05:23.750000Z")
    assert (response["content-type"], answer) == ("application/json", b"[0.9]")
    assert (sender.sent, sender.failed, sender.dropped, sender.problem) == (3, {}, {}, None)
    assert len(receiver.connections) == 1


def test_a_failed_request_has_no_event_of_its_answer() -> None:
    [(headers, _)] = events_of(SAMPLE._replace(status=500, headers={}))
    assert headers["ce-type"] == "org.kubeflow.serving.inference.request"
    assert headers["content-type"] == "application/octet-stream"


def test_samples_are_dropped_and_counted_while_the_receiver_is_slow(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_WAITING_BYTES", 25)
    receiver.gate.clear()
    sender = EventSender(receiver.url)
    for _ in range(5):
        sender.send(SAMPLE)  # A sample has 9 bytes, and the first one waits for its answer.
    assert sender.dropped == {"digits": 3}
    receiver.gate.set()
    sender.close(DEADLINE)
    assert sender.sent == 2


def test_a_sender_goes_on_after_refusals(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 503
    sender = EventSender(receiver.url)
    sender.send(SAMPLE)
    sender.send(SAMPLE)
    for _ in range(2):
        receiver.received.get(timeout=DEADLINE)  # The answer is not sent after a refusal.
    receiver.status = 202
    sender.send(SAMPLE)
    sender.close(DEADLINE)
    # The receiver changes its status while it may still answer the second sample.
    assert sender.sent in (1, 2)
    assert sender.sent + sender.failed["digits"] == 3
    assert sender.problem is None
    assert caplog.text.count("events cannot be sent") == 1


def test_a_receiver_that_is_not_there_is_the_problem(free_ports: FreePorts) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/"
    sender = EventSender(url)
    sender.send(SAMPLE)
    sender.close(DEADLINE)
    assert (sender.sent, sender.failed) == (0, {"digits": 1})
    assert sender.problem is not None
    assert sender.problem.startswith(f"{url}: ")


def test_the_end_does_not_wait_for_a_receiver_that_hangs(receiver: Receiver) -> None:
    receiver.gate.clear()
    sender = EventSender(receiver.url)
    sender.send(SAMPLE)
    sender.send(SAMPLE)
    sender.close(0.01)
    receiver.gate.set()
    receiver.received.get(timeout=DEADLINE)
    assert not sender.dropped


def test_the_body_of_an_endless_answer_is_not_read(receiver: Receiver) -> None:
    receiver.is_endless = True
    sender = EventSender(receiver.url)
    sender.send(SAMPLE)
    sender.close(DEADLINE)
    assert sender.sent == 1
