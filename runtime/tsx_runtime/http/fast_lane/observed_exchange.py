"""Exchanges that are logged, traced or timed, and the sampling that selects them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from tsx_runtime.api.access_log import BROKEN, CLIENT_DISCONNECTED
from tsx_runtime.api.server_timing import TIMED
from tsx_runtime.api.tracing import describe
from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.core.telemetry.tracing import JobTrace, OpenSpan
from tsx_runtime.errors import TsxError, is_failure
from tsx_runtime.http.fast_lane.exchange import Connection, Exchange
from tsx_runtime.http.fast_lane.heads import Head
from tsx_runtime.wire import Body, Buffer

if TYPE_CHECKING:
    from tsx_runtime.http.fast_lane.lane import Lane

ExchangeFactory: TypeAlias = Callable[[Connection, Head, Body, float], Exchange]


def exchange_factory(lane: Lane) -> ExchangeFactory:
    """Return the function or class that creates the exchanges of a connection.

    If no request is logged, traced or timed, this is `Exchange` itself, which takes no extra time.
    """
    if lane.tracer is not None or lane.timing_share:
        return _new_sampled_exchange
    if lane.log is None:
        return Exchange
    return LoggedExchange if lane.log.share >= 1 else _new_sampled_exchange


def _new_sampled_exchange(
    connection: Connection, head: Head, body: Body, arrived: float
) -> Exchange:
    lane = connection.lane
    is_logged = lane.log is not None and lane.log.wants()
    span = (
        lane.tracer.begin(head.parent, arrived)
        if lane.tracer is not None and lane.tracer.should_trace(head.parent)
        else None
    )
    exchange = (
        TracedExchange(connection, head, body, arrived, span, is_logged)
        if span is not None
        else (LoggedExchange if is_logged else Exchange)(connection, head, body, arrived)
    )
    if lane.timing_share and random.random() < lane.timing_share:
        exchange.time(TIMED)
    return exchange


class LoggedExchange(Exchange):
    """An exchange that has a line in the access log."""

    _is_line_pending = True  # whether the line has not been written yet

    def __init__(self, connection: Connection, head: Head, body: Body, arrived: float) -> None:
        Exchange.__init__(self, connection, head, body, arrived)
        self._head = head

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        if self.plain and status == 200:  # Nearly all responses take this branch.
            Exchange.answer(self, status, headers, body, batch)
            self._write_line(200, "", batch[2])
        else:
            self._answer(status, headers, body, batch)

    def _answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        is_streamed = self._flow is not None
        Exchange.answer(self, status, headers, body, batch)
        self._end(200 if is_streamed else status, BROKEN if is_streamed and status >= 400 else "")

    def refuse(self, error: TsxError) -> None:
        is_streamed = self._flow is not None
        super().refuse(error)
        if is_streamed:
            self._end(200, BROKEN)
        else:
            self._end(error.status, "", type(error).__name__)

    def leave(self) -> None:
        """Write the line of a stream that the client leaves before its end."""
        if self._flow is not None:
            self._write_line(200, CLIENT_DISCONNECTED, time.monotonic())
        super().leave()

    def _end(self, status: int, broken_reason: str, failure: str = "") -> None:
        """Write the line; `failure` is the name of the error that refused the request."""
        if broken_reason or not self.gone:
            self._write_line(status, broken_reason, time.monotonic())

    def _write_line(self, status: int, broken_reason: str, now: float) -> None:
        connection = self.connection
        log = connection.lane.log
        if log is not None and self._is_line_pending:
            self._is_line_pending = False
            destination = self.routed or self.destination
            # The destination may still be a splitter, which has no version.
            version = getattr(destination, "version", "")
            log.add(
                connection.client,
                self._head.line,
                status,
                self.arrived,
                now,
                self.request_id,
                destination.name,
                version,
                broken_reason,
            )


class TracedExchange(LoggedExchange):
    """An exchange that has a span, and with `is_logged` a line in the access log."""

    def __init__(
        self,
        connection: Connection,
        head: Head,
        body: Body,
        arrived: float,
        span: OpenSpan,
        is_logged: bool,
    ) -> None:
        super().__init__(connection, head, body, arrived)
        self._is_line_pending = is_logged
        # Both become None after their use.
        self._span: OpenSpan | None = span
        self._trace: JobTrace | None = JobTrace(span)
        self.meta = self._trace.with_traceparent(self.meta)

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        """Record the times of the batch, write the response, and end the span."""
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.on_answer(self.served_by(), self.arrived, status, headers, batch)
        self._answer(status, headers, body, batch)

    def refuse(self, error: TsxError) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.on_refusal(self.served_by(), self.arrived, error)
        super().refuse(error)

    def _end(self, status: int, broken_reason: str, failure: str = "") -> None:
        super()._end(status, broken_reason, failure)
        span, self._span = self._span, None
        if span is None:
            return
        if self.gone:
            status, broken_reason = 0, CLIENT_DISCONNECTED
        error = broken_reason or (failure or f"status {status}" if is_failure(status) else "")
        span.finish(time.monotonic(), error, partial(self._describe, span, status))

    def _describe(self, span: OpenSpan, status: int) -> None:
        connection, head = self.connection, self._head
        method, path, version = (*head.line.split(" "), "", "")[:3]
        path = path.partition("?")[0]
        describe(
            span,
            method,
            path,
            connection.scheme or "http",
            version.removeprefix("HTTP/"),
            connection.client,
            head.headers,
        )
        span.attributes["tsx.request.id"] = self.request_id.decode()
        if status:
            span.attributes["http.response.status_code"] = status
