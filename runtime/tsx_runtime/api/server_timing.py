"""Requests that get a `Server-Timing` header, or that become exemplars of metrics (a sampled
trace).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from tsx_runtime.api.headers import Pair
from tsx_runtime.core.scheduling.job import Job, WaitingJob
from tsx_runtime.core.telemetry.batch_times import Batch, BatchTimes
from tsx_runtime.core.telemetry.tracing import parent_of
from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.wire import Body, Buffer

if TYPE_CHECKING:
    from tsx_runtime.core.models.model import ModelVersion
    from tsx_runtime.core.scheduling.job import Route

TIMING = b"x-tsx-timing"
MILLI = 1000.0


class TimingRequest(NamedTuple):
    timing: bool  # whether the answer is to have `Server-Timing`
    trace_id: str  # of a trace that is sampled; empty where there is none


TIMED = TimingRequest(timing=True, trace_id="")


def parse_timing_request(headers: Sequence[Pair]) -> TimingRequest | None:
    """None for nearly all requests. Names are in lower case."""
    timing, parent = False, None
    for name, value in headers:
        if name == TIMING:
            timing = value.strip() == b"1"
        elif name == b"traceparent":
            parent = parent_of(headers)
    trace_id = f"{parent.trace_id:032x}" if parent is not None and parent.sampled else ""
    return TimingRequest(timing, trace_id) if timing or trace_id else None


def server_timing(times: BatchTimes, arrived: float) -> bytes:
    """The value of the header: each part with its milliseconds (W3C Server Timing)."""
    parts = times.seconds(arrived).items()
    return ", ".join(
        f"{name};dur={MILLI * seconds:.3f}" for name, seconds in parts if name != "other"
    ).encode()


def timing_header(
    request: TimingRequest, stats: Stats, job: Job, status: int, batch: Batch
) -> bytes:
    """The value of `Server-Timing` where it is asked for; the request is remembered, and its trace
    pointed to, in any case.
    """
    times = stats.times(batch)
    stats.keep(job.request_id, job.arrived, status, times)
    if request.trace_id:
        stats.point_out(request.trace_id, job.arrived, times)
    return server_timing(times, job.arrived) if request.timing else b""


class TimedJob(WaitingJob):
    """A job of the ASGI lane that keeps the `Server-Timing` of its answer."""

    __slots__ = ("_timing", "header")

    def __init__(
        self,
        timing: TimingRequest,
        route: Route,
        meta: bytes,
        body: Body,
        arrived: float,
        deadline: float | None,
        priority: int,
    ) -> None:
        super().__init__(meta, body, arrived, deadline, priority)
        self._timing = timing
        self._route = route
        self.header = b""

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        version = cast("ModelVersion", self.routed or self._route)
        self.header = timing_header(self._timing, version.stats, self, status, batch)
        super().answer(status, headers, body, batch)
