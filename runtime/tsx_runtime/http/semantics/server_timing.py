"""What a request asks beside its answer: where its time went (`Server-Timing`), or to be pointed to from the metrics (a sampled trace)."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from tsx_runtime.api.headers import Pair
from tsx_runtime.core.scheduling.job import Job, WaitingJob
from tsx_runtime.core.telemetry.batch_times import BatchTimes
from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.wire import Body, Buffer

if TYPE_CHECKING:
    from tsx_runtime.core.models.model import ModelVersion
    from tsx_runtime.core.scheduling.route import Route
    from tsx_runtime.http.fast_lane.exchange import Exchange

TIMING = b"x-tsx-timing"
MILLI = 1000.0

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(?:-.*)?")

ExchangeT = TypeVar("ExchangeT", bound="Exchange")


class Asks(NamedTuple):
    timing: bool
    trace_id: str  # of a trace that is sampled; empty where there is none


TIMED = Asks(timing=True, trace_id="")


def asks_of(headers: Iterable[Pair]) -> Asks | None:
    """None where it asks nothing, as nearly all do. Names are in lower case."""
    timing, trace_id = False, ""
    for name, value in headers:
        if name == TIMING:
            timing = value.strip() == b"1"
        elif name == b"traceparent":
            trace_id = sampled_trace(value)
    return Asks(timing, trace_id) if timing or trace_id else None


def sampled_trace(traceparent: bytes) -> str:
    """The id of the trace, where its caller keeps it (W3C Trace Context); else nothing."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or not int(found[2], 16) & 1 or (traceparent.startswith(b"00") and found.end() != found.end(2)):
        return ""
    return found[1].decode()


def server_timing(times: BatchTimes, arrived: float) -> bytes:
    """The value of the header: each part with its milliseconds (W3C Server Timing)."""
    parts = times.seconds(arrived).items()
    return ", ".join(f"{name};dur={MILLI * seconds:.3f}" for name, seconds in parts if name != "other").encode()


def reply(asks: Asks, stats: Stats, job: Job, status: int) -> bytes:
    """What goes into the header, if it is asked for; to be called while the request's batch is the newest."""
    stats.keep(job.request_id, job.arrived, status)
    if asks.trace_id:
        stats.point_out(asks.trace_id, job.arrived)
    times = stats.batch if asks.timing else None
    return b"" if times is None else server_timing(times, job.arrived)


def sometimes_timed(kind: Callable[..., ExchangeT], share: float) -> Callable[..., ExchangeT]:
    """Makes exchanges of which a share is timed although nobody has asked (the setting `server_timing_share`)."""

    def make(*arguments: object) -> ExchangeT:
        exchange = kind(*arguments)
        if random.random() < share:
            exchange.ask(TIMED)
        return exchange

    return make


class AskingJob(WaitingJob):
    """A job of the other lane that keeps what the header of its answer says."""

    __slots__ = ("_asks", "timing")

    def __init__(self, asks: Asks, route: Route, meta: bytes, body: Body, arrived: float, deadline: float | None, priority: int) -> None:
        super().__init__(meta, body, arrived, deadline, priority)
        self._asks = asks
        self._route = route
        self.timing = b""

    def answer(self, status: int, headers: Buffer, body: Buffer) -> None:
        version = cast("ModelVersion", self.routed or self._route)
        self.timing = reply(self._asks, version.stats, self, status)
        super().answer(status, headers, body)
