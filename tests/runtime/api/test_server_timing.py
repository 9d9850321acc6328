"""The request headers that ask for timing or carry a trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.api.server_timing import TIMED, TimingRequest, parse_timing_request, server_timing
from tsx_runtime.core.telemetry.batch_times import NAN, batch_times

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("traceparent", "trace"),
    [
        (f"00-{TRACE}-{SPAN}-01", TRACE),
        (f"00-{TRACE}-{SPAN}-03", TRACE),
        (f"cc-{TRACE}-{SPAN}-01-what-is-new", TRACE),
        # The trace is not sampled.
        (f"00-{TRACE}-{SPAN}-00", ""),
        (f"00-{TRACE}-{SPAN}-01-x", ""),
        (f"ff-{TRACE}-{SPAN}-01", ""),
        (f"00-{'0' * 32}-{SPAN}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE.upper()}-{SPAN}-01", ""),
        ("", ""),
    ],
)
def test_only_a_sampled_trace_is_referenced(traceparent: str, trace: str) -> None:
    request = parse_timing_request([(b"traceparent", traceparent.encode())])
    assert request == (TimingRequest(timing=False, trace_id=trace) if trace else None)


@given(st.binary(max_size=80))
def test_arbitrary_header_bytes_are_a_valid_trace_or_none(value: bytes) -> None:
    request = parse_timing_request([(b"traceparent", value)])
    assert request is None or len(request.trace_id) == 32


def test_a_request_without_headers_asks_for_no_timing() -> None:
    assert parse_timing_request([(b"host", b"x"), (b"x-tsx-timing", b"0")]) is None
    assert parse_timing_request([(b"x-tsx-timing", b"1")]) == TIMED
    assert parse_timing_request(
        [(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())]
    ) == TimingRequest(timing=False, trace_id=TRACE)


def test_the_timing_header_lists_known_durations_in_milliseconds() -> None:
    batch = batch_times(10.0, 10.5, 12.0, 3, (10.75, 1.0, 0.25, 0.5, NAN))
    assert server_timing(batch, 9.0) == (
        b"queue;dur=1000.000, batch;dur=750.000, preprocess;dur=250.000, "
        b"inference;dur=500.000, total;dur=3000.000"
    )
