"""Spans of requests that stream, are split, or lose their clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.connections import connect_raw
from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.clients.rawhttp import request
from tsx_runtime.core.telemetry.tracing import Span, Tracer
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.settings.traffic_policy import Traffic

both_lanes = pytest.mark.parametrize("chunked", [False, True], ids=["fast", "asgi"])


class SpanRecorder:
    """A collector of the spans that a tracer with this sampling rate exports."""

    def __init__(self, sampling_rate: float = 0.0) -> None:
        self.spans: list[Span] = []
        self.tracer = Tracer(sampling_rate, lambda make: self.spans.extend(make()))

    def of(self, trace: int) -> dict[str, Span]:
        return {span.name: span for span in self.spans if span.trace_id == trace}


@pytest.fixture(scope="module")
def traced(processes: None, store: Path) -> Iterator[tuple[RunningServer, SpanRecorder]]:
    recorder = SpanRecorder()
    with running_server(make_settings(store), tracer=recorder.tracer) as server:
        server.register("talker.mar", initial_workers=1)
        server.register("talker2.mar", initial_workers=1)
        yield server, recorder


def headers(trace: int, **extra_headers: str) -> dict[str, str]:
    return {
        "traceparent": f"00-{trace:032x}-00f067aa0ba902b7-01",
        **{name.replace("_", "-"): value for name, value in extra_headers.items()},
    }


REQUEST = "POST /predictions/{model}"


def wait_for_worker(server: RunningServer, until: Callable[..., None]) -> None:
    """Wait until the worker is ready; an earlier test may have ended its process."""
    until(lambda: server.registry.find("talker", "1.0").workers[0].state is WorkerState.READY)


@both_lanes
def test_a_stream_is_one_span_and_a_broken_one_is_an_error(traced, until, chunked):
    server, recorder = traced
    wait_for_worker(server, until)
    first = 100 + 10 * chunked
    body: Any = iter([b"x"]) if chunked else b"x"
    answer = server.inference.post(
        "/predictions/talker", content=body, headers=headers(first, x_do="stream")
    )
    assert answer.text == "abc"
    until(lambda: REQUEST in recorder.of(first))
    spans = recorder.of(first)
    assert {REQUEST, "queue", "batch wait", "handler"} <= set(spans)
    assert (spans[REQUEST].error, spans[REQUEST].attributes["http.response.status_code"]) == (
        "",
        200,
    )
    assert spans["handler"].end <= spans[REQUEST].end
    body = iter([b"x"]) if chunked else b"x"
    with pytest.raises(Exception, match=r"peer closed|incomplete"):
        server.inference.post(
            "/predictions/talker", content=body, headers=headers(first + 1, x_do="break")
        )
    until(lambda: REQUEST in recorder.of(first + 1))
    assert recorder.of(first + 1)[REQUEST].error


@both_lanes
def test_the_span_of_a_client_that_leaves_is_reported(traced, until, tmp_path, chunked):
    server, recorder = traced
    wait_for_worker(server, until)
    trace = 200 + chunked
    file = tmp_path / "go"
    lines = [
        (name.encode(), value.encode())
        for name, value in headers(trace, x_do="wait", x_file=str(file)).items()
    ]
    framing = (b"Transfer-Encoding", b"chunked") if chunked else (b"Content-Length", b"0")
    head = request(target=b"/predictions/talker", headers=[*lines, framing])
    with connect_raw(server) as client:
        client.send(head + b"0\r\n\r\n" * chunked)
        version = server.registry.find("talker", "1.0")
        # The end of the previous worker may not be known yet.
        until(lambda: (channel := version.workers[0].channel) is not None and channel.sent)
        channel = version.workers[0].channel
    # The server must notice that the client left before the answer arrives.
    until(lambda: all(job.gone for sent_batch in channel.sent for job in sent_batch.jobs))
    file.touch()
    until(lambda: REQUEST in recorder.of(trace))
    span = recorder.of(trace)[REQUEST]
    assert span.error == "the client disconnected"
    assert "http.response.status_code" not in span.attributes


def test_the_span_names_the_version_chosen_by_a_split(traced, until):
    server, recorder = traced
    server.call(lambda: server.registry.set_traffic("talker", Traffic(weights={"2.0": 1})))
    try:
        assert (
            server.inference.post("/predictions/talker", headers=headers(300)).json()["version"]
            == "2.0"
        )
    finally:
        server.call(lambda: server.registry.set_traffic("talker", Traffic()))
    until(lambda: REQUEST in recorder.of(300))
    assert recorder.of(300)[REQUEST].attributes["tsx.model.version"] == "2.0"


@pytest.mark.usefixtures("processes")
def test_untraced_requests_are_sampled_at_the_configured_rate(store, until):
    recorder = SpanRecorder(1.0)
    with running_server(make_settings(store), tracer=recorder.tracer) as server:
        server.register("talker.mar", initial_workers=1)
        reported_spans = [
            server.inference.post("/predictions/talker").json()["headers"]["traceparent"]
            for _ in range(2)
        ]
        until(lambda: sum(span.name == REQUEST for span in recorder.spans) == 2)
    requests = {f"{span.trace_id:032x}": span for span in recorder.spans if span.name == REQUEST}
    assert {text.split("-")[1] for text in reported_spans} == set(requests)
    assert len(requests) == 2
    assert {span.parent_id for span in requests.values()} == {0}
