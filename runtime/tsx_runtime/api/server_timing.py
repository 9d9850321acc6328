"""Requests for a `Server-Timing` header, and sampled traces that metrics show as exemplars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tsx_runtime.api.headers import Pair
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.telemetry.batch_times import Batch, BatchTimes
from tsx_runtime.core.telemetry.tracing import parent_of

TIMING_HEADER = b"x-tsx-timing"
MS_PER_SECOND = 1000.0


class TimingRequest(NamedTuple):
    timing: bool  # whether the response gets `Server-Timing`
    trace_id: str  # id of a sampled trace, or an empty string


TIMED = TimingRequest(timing=True, trace_id="")


def parse_timing_request(headers: Sequence[Pair]) -> TimingRequest | None:
    """Return the request for measurements, or None; header names are in lower case."""
    timing, parent = False, None
    for name, value in headers:
        if name == TIMING_HEADER:
            timing = value.strip() == b"1"
        elif name == b"traceparent":
            parent = parent_of(headers)
    trace_id = f"{parent.trace_id:032x}" if parent is not None and parent.sampled else ""
    return TimingRequest(timing, trace_id) if timing or trace_id else None


def server_timing(times: BatchTimes, arrived: float) -> bytes:
    """Return the header's value: the milliseconds of each step (W3C Server Timing)."""
    parts = times.seconds(arrived).items()
    return ", ".join(
        f"{name};dur={MS_PER_SECOND * seconds:.3f}" for name, seconds in parts if name != "other"
    ).encode()


def timing_header(request: TimingRequest, job: Job, status: int, batch: Batch) -> bytes:
    """Record the request's times, and return the line of `Server-Timing`, or nothing."""
    stats = (job.routed or job.destination).stats
    times = stats.times(batch)
    stats.remember(job.request_id, job.arrived, status, times)
    if request.trace_id:
        stats.add_exemplar(request.trace_id, job.arrived, times)
    return b"server-timing: %b\r\n" % server_timing(times, job.arrived) if request.timing else b""
