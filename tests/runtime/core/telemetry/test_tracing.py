"""Traces of requests: which requests are traced, their spans, and the handler's `traceparent`."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import BATCH
from tsx_runtime.core.telemetry.batch_times import BatchTimes
from tsx_runtime.core.telemetry.tracing import JobTrace, OpenSpan, Parent, Span, Tracer, parent_of
from tsx_runtime.errors import QueueFull
from tsx_runtime.wire import parse_header_block, parse_request_meta, request_meta

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NAN = float("nan")


def parse_headers(traceparent: str, *states: str) -> Parent | None:
    return parent_of(
        [
            (b"traceparent", traceparent.encode()),
            *((b"tracestate", state.encode()) for state in states),
        ]
    )


def test_a_traceparent_is_parsed_as_w3c_specifies() -> None:
    assert parse_headers(f"00-{TRACE}-{SPAN}-01", "a=1", "b=2") == Parent(
        int(TRACE, 16), int(SPAN, 16), True, "a=1,b=2"
    )
    assert parse_headers(f"00-{TRACE}-{SPAN}-00") == Parent(
        int(TRACE, 16), int(SPAN, 16), False, ""
    )
    # Later versions of the header may have more fields.
    assert parse_headers(f"01-{TRACE}-{SPAN}-03-more") is not None


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        TRACE,
    ],
)
def test_an_invalid_traceparent_is_ignored(value: str) -> None:
    assert parse_headers(value) is None


def test_two_traceparents_are_both_ignored() -> None:
    assert parent_of([(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())] * 2) is None


@given(st.floats(0, 1), st.floats(0, 1, exclude_max=True))
def test_the_clients_sampling_flag_overrides_the_sampling_rate(
    sampling_rate: float, random_number: float
) -> None:
    tracer = Tracer(sampling_rate, lambda make_spans: None, lambda: random_number)
    assert tracer.should_trace(None) == (random_number < sampling_rate)
    assert tracer.should_trace(Parent(1, 2, True, ""))
    assert not tracer.should_trace(Parent(1, 2, False, ""))


HEADERS = st.lists(
    st.sampled_from(
        [
            (b"Host", b"x"),
            (b"TraceParent", b"old"),
            (b"X-traceparent", b"kept"),
            (b"traceparent", b"older"),
        ]
    ),
    max_size=6,
)


@given(st.sampled_from([b"", b"a=b"]), HEADERS)
def test_the_handler_gets_one_traceparent_and_is_asked_for_attributes(
    query: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    parent_span = Tracer(1, lambda make_spans: None).begin(None, 1.0)
    request_id, reported_query, block = parse_request_meta(
        JobTrace(parent_span).with_traceparent(request_meta("id-1", query, headers))
    )
    assert (request_id, reported_query) == ("id-1", query.decode())
    header_fields = list(parse_header_block(block))
    expected = [
        (name.decode(), value.decode()) for name, value in headers if name.lower() != b"traceparent"
    ]
    assert header_fields[:-1] == [*expected, ("x-tsx-span", "1")]
    assert header_fields[-1][0] == "traceparent"
    assert re.fullmatch(f"00-{parent_span.trace_id:032x}-[0-9a-f]{{16}}-01", header_fields[-1][1])


def trace_batch(
    *arrivals: float, times: BatchTimes, status: int = 200, headers: bytes = b""
) -> tuple[list[Span], OpenSpan]:
    """Return the spans of the requests of one batch, and the last request's parent span."""
    spans: list[Span] = []
    tracer = Tracer(1, lambda make_spans: spans.extend(make_spans()))
    stats = SimpleNamespace(
        times=lambda batch: times, add_exemplar=lambda trace_id, arrived, times: None
    )
    version = SimpleNamespace(name="m", version="1.0", stats=stats)
    for arrived in arrivals:
        parent_span = tracer.begin(None, arrived)
        JobTrace(parent_span).on_answer(version, arrived, status, memoryview(headers), BATCH)
    return spans, parent_span


TIMES = BatchTimes(
    free=2.0,
    sent=2.5,
    began=3.0,
    done=6.0,
    answered=7.0,
    size=2,
    preprocess=0.5,
    inference=1.0,
    postprocess=0.25,
)


def test_spans_divide_the_time_of_a_request() -> None:
    spans, parent_span = trace_batch(1.0, times=TIMES)
    assert {span.name: (span.start, span.end) for span in spans} == {
        "queue": (1.0, 2.0),
        "batch wait": (2.0, 3.0),
        "handler": (3.0, 6.0),
        "preprocess": (3.0, 3.5),
        "inference": (3.5, 4.5),
        "postprocess": (5.75, 6.0),
    }
    assert parent_span.attributes == {"tsx.model.name": "m", "tsx.model.version": "1.0"}


def test_without_waiting_the_queue_span_is_empty() -> None:
    spans, _ = trace_batch(
        2.25, times=TIMES._replace(preprocess=NAN, postprocess=NAN, inference=3.0), status=500
    )
    assert [(span.name, span.start, span.end) for span in spans] == [
        ("queue", 2.25, 2.25),
        ("batch wait", 2.25, 3.0),
        ("handler", 3.0, 6.0),
        ("inference", 3.0, 6.0),
    ]
    assert [span.error for span in spans] == ["", "", "status 500", ""]


@pytest.mark.parametrize(
    ("headers", "attributes"),
    [
        (b'x-tsx-span: {"a": 1}\r\n', {"a": 1}),
        (b'content-type: text/html\r\nx-tsx-span: {"a": ["b"]}\r\nx: y\r\n', {"a": ["b"]}),
        (b"x-tsx-span: {\r\n", {}),
        (b"x-tsx-span: [1]\r\n", {}),
        (b"x: x-tsx-span: {}\r\n", {}),
        (b"", {}),
    ],
)
def test_the_handlers_span_has_the_attributes_that_the_worker_sends(
    headers: bytes, attributes: dict[str, Any]
) -> None:
    spans, _ = trace_batch(1.0, times=TIMES, headers=headers)
    (handler,) = (span for span in spans if span.name == "handler")
    assert handler.attributes == {"tsx.batch.size": 2, **attributes}


def test_the_spans_of_one_batch_are_linked() -> None:
    spans, _ = trace_batch(1.0, 1.5, times=TIMES)
    first, second = (span for span in spans if span.name == "handler")
    assert first.links == ()
    assert second.links == ((first.trace_id, first.span_id),)


def test_a_refused_request_has_only_a_queue_span() -> None:
    spans: list[Span] = []
    parent_span = Tracer(1, lambda make_spans: spans.extend(make_spans())).begin(
        Parent(5, 6, True, "a=1"), 1.0
    )
    JobTrace(parent_span).on_refusal(SimpleNamespace(name="m"), 1.0, QueueFull("full"))
    parent_span.finish(2.0, "QueueFull")
    queue, request = spans
    assert (queue.name, queue.parent_id, queue.error) == ("queue", request.span_id, "QueueFull")
    assert (request.trace_id, request.parent_id, request.is_remote, request.state) == (
        5,
        6,
        True,
        "a=1",
    )
