"""Exchanges that are logged, traced or timed, and the sampling that selects them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from tsx_runtime.api.access_log import AccessLog, shown
from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.core.telemetry.tracing import JobTrace, OpenSpan, Tracer
from tsx_runtime.errors import TsxError, is_failure
from tsx_runtime.http.fast_lane.exchange import Connection, Exchange
from tsx_runtime.http.fast_lane.heads import Head
from tsx_runtime.http.semantics.access_log import BROKEN, LEFT
from tsx_runtime.http.semantics.server_timing import TIMED
from tsx_runtime.http.semantics.tracing import describe
from tsx_runtime.wire import Body, Buffer

if TYPE_CHECKING:
    from tsx_runtime.http.fast_lane.lane import Lane

NewExchange: TypeAlias = Callable[[Connection, Head, Body, float], Exchange]


def new_exchange_of(lane: Lane) -> NewExchange:
    """What makes the exchanges of a connection: the class itself where no request is observed, so that there it costs nothing."""
    return Exchange if lane.log is None and lane.tracer is None and not lane.timing_share else _sampled


def _sampled(connection: Connection, head: Head, body: Body, arrived: float) -> Exchange:
    lane = connection.lane
    log = lane.log if lane.log is not None and lane.log.wants() else None
    tracer = lane.tracer if lane.tracer is not None and lane.tracer.wants(head.parent) else None
    exchange = (
        Exchange(connection, head, body, arrived)
        if log is None and tracer is None
        else ObservedExchange(connection, head, body, arrived, log, tracer)
    )
    if lane.timing_share and random.random() < lane.timing_share:
        exchange.time(TIMED)
    return exchange


class ObservedExchange(Exchange):
    """An exchange that has a line in the access log, a span, or both."""

    def __init__(
        self, connection: Connection, head: Head, body: Body, arrived: float, log: AccessLog | None, tracer: Tracer | None
    ) -> None:
        super().__init__(connection, head, body, arrived)
        self._head = head
        self._log = log  # each of these until it is used
        self._span = None if tracer is None else tracer.begin(head.parent, arrived)
        self._trace = None if self._span is None else JobTrace(self._span)
        if self._trace is not None:
            self.meta = self._trace.with_traceparent(self.meta)

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        streamed = self._flow is not None
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.answered(self.served_by(), self.arrived, status, batch)
        super().answer(status, headers, body, batch)
        self._end(200 if streamed else status, BROKEN if streamed and status >= 400 else "")

    def refuse(self, error: TsxError) -> None:
        streamed = self._flow is not None
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.refused(self.served_by(), self.arrived, error)
        super().refuse(error)
        if streamed:
            self._end(200, BROKEN)
        else:
            self._end(error.status, "", type(error).__name__)

    def leave(self) -> None:
        if self._flow is not None:
            self._write_line(200, LEFT)
        super().leave()

    def _end(self, status: int, broken: str, failure: str = "") -> None:
        """`failure`: the error on the span, where the request failed."""
        if broken or not self.gone:
            self._write_line(status, broken)
        span, self._span = self._span, None
        if span is None:
            return
        if self.gone:
            status, broken = 0, LEFT
        error = broken or (failure or f"status {status}" if is_failure(status) else "")
        span.finish(time.monotonic(), error, partial(self._describe, span, status))

    def _write_line(self, status: int, broken: str) -> None:
        log, self._log = self._log, None
        if log is not None:
            served = self.served_by()
            version = getattr(served, "version", "")  # a split that has not picked a version has none
            line, request_id = shown(self._head.line), self.request_id.decode()
            log.add(self.connection.client, line, status, self.arrived, request_id, served.name, version, broken)

    def _describe(self, span: OpenSpan, status: int) -> None:
        connection, head = self.connection, self._head
        method, path, version = (*head.line.split(" "), "", "")[:3]
        path = path.partition("?")[0]
        describe(span, method, path, connection.scheme or "http", version.removeprefix("HTTP/"), connection.client, head.headers)
        span.attributes["tsx.request.id"] = self.request_id.decode()
        if status:
            span.attributes["http.response.status_code"] = status
