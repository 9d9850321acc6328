"""The job of a fast-lane request, which writes its response to the connection."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol, cast

from tsx_runtime.api import errors
from tsx_runtime.api.headers import new_request_id
from tsx_runtime.api.server_timing import TimingRequest, timing_header
from tsx_runtime.core.scheduling.channel import MAX_SMALL_BYTES
from tsx_runtime.core.scheduling.job import Flow, Job
from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.errors import TsxError
from tsx_runtime.http.fast_lane.heads import Head
from tsx_runtime.http.fast_lane.response_heads import CLOSE
from tsx_runtime.wire import JSON_HEADER, Body, Buffer

if TYPE_CHECKING:
    from tsx_runtime.core.models.model import ModelVersion
    from tsx_runtime.http.fast_lane.lane import Lane

# A larger response has its own memory (see `core/scheduling/channel.py`), and is not copied.
MAX_COPIED_BYTES = MAX_SMALL_BYTES

logger = logging.getLogger("tsx.http")


class Connection(Protocol):
    """The interface of a connection that an exchange uses."""

    lane: Lane

    @property
    def client(self) -> tuple[str, int] | None:
        """The address of the client; None for a Unix socket."""

    @property
    def scheme(self) -> str | None: ...

    @property
    def write_paused(self) -> bool:
        """Whether too many written bytes have not been read by the client."""

    def write(self, data: Buffer) -> None:
        """Write a part of a response."""

    def finish(self, data: Buffer, keep_alive: bool) -> None:
        """Write the last bytes of a response, and continue with the next request."""

    def abort(self) -> None:
        """Close before the end of a streamed response, so that the client notices the error."""


class Exchange(Job):
    """A request and its response; a connection has one exchange at a time."""

    # The end of the request id's line, and the header lines that the server adds.
    _extra_lines = b"\r\n"
    _timing: TimingRequest | None = None
    _flow: Flow | None = None  # flow control of a streamed response
    _is_paused = False  # whether the worker has been told to send no more parts
    _is_event_stream = False  # whether the response is a stream of server-sent events
    _counted_bytes = 0  # bytes of the body that are taken from the budget

    def __init__(self, connection: Connection, head: Head, body: Body, arrived: float) -> None:
        self.connection = connection
        self.request_id = request_id = new_request_id()
        self.meta = request_id + head.meta
        self.body = body
        self.arrived = arrived
        self.keep_alive = self.plain = head.keep_alive

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        """Write the handler's response, or the last part of a stream."""
        connection = self.connection
        lane = connection.lane
        # Nearly all responses take the first branch.
        if (
            status == 200
            and self.plain
            and len(body) <= MAX_COPIED_BYTES
            and (not headers or headers == JSON_HEADER)
        ):
            heads = lane.response_heads
            if heads.server_state.default_headers is not heads.default:
                heads.renew()
            lane.counts.plain += 1
            tails = heads.json_tails if headers else heads.tails
            connection.finish(
                b"".join(
                    (heads.plain_start, self.request_id, self._extra_lines, tails[len(body)], body)
                ),
                True,
            )
        else:
            self._give_back()
            if not self.gone:
                self._write_response(status, headers, body, batch)

    def route(self, version: Any, extra_lines: bytes) -> None:
        """Store the version that the splitter has chosen, and header lines for the response."""
        self.routed, self._extra_lines = version, b"\r\n" + extra_lines

    def served_by(self) -> ModelVersion:
        """Return the version that serves this request."""
        return cast("ModelVersion", self.routed or self.destination)

    def time(self, request: TimingRequest) -> None:
        """Add a `Server-Timing` header to the response."""
        self._timing = request
        self.plain = False

    def set_counted_bytes(self, size: int) -> None:
        """Store the number of bytes to give back to the server's budget."""
        self._counted_bytes = size
        self.plain = False  # The fast path for plain responses gives no bytes back.

    def _give_back(self) -> None:
        size, self._counted_bytes = self._counted_bytes, 0
        if size:
            self.connection.lane.bytes_in_flight.give(size)

    def close_after_response(self) -> None:
        """Close the connection after this response."""
        self.keep_alive = self.plain = False

    def leave(self) -> None:
        """Drop the response, because the client has left."""
        self.gone = True
        self.plain = False
        self.resume_stream()

    def _write_response(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        timing = b"" if self._timing is None else timing_header(self._timing, self, status, batch)
        if self._flow is not None:
            self._end_stream(status, body)
            return
        connection = self.connection
        lane = connection.lane
        try:
            head_start, head_end = lane.response_heads.split_around_request_id(
                status, bytes(headers)
            )
        except TsxError as error:
            self.refuse(error)
            return
        if status >= 400 and (convert := errors.converter_for_meta(self.meta)) is not None:
            body = convert(bytes(body))
        if status == 205:
            body = b""  # A 205 must have no content (RFC 9110, section 15.3.6).
        lane.counts.add(status)
        close = b"" if self.keep_alive else CLOSE
        length = b"" if status in (204, 304) else b"content-length: %d\r\n" % len(body)
        head = b"%b%b%b%b%b%b%b\r\n" % (
            head_start,
            self.request_id,
            self._extra_lines,
            head_end,
            length,
            timing,
            close,
        )
        if not length:
            connection.finish(head, self.keep_alive)
        elif len(body) <= MAX_COPIED_BYTES:
            connection.finish(b"".join((head, body)), self.keep_alive)
        else:
            connection.write(head)
            connection.finish(body, self.keep_alive)

    def refuse(self, error: TsxError) -> None:
        """Write an error as the response, or break off a stream."""
        self._give_back()
        if self.gone:
            return
        connection = self.connection
        if self._flow is not None:
            self.resume_stream()
            self._break_off(error.message)
            return
        convert = errors.converter_for_meta(self.meta)
        status, answer = connection.lane.response_heads.refusal(
            self.request_id, error, self.keep_alive, convert, self._extra_lines
        )
        connection.lane.counts.add(status)
        connection.finish(answer, self.keep_alive)

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        """Write a part of a streamed response."""
        if self.gone:
            return
        connection = self.connection
        if self._flow is None:
            try:
                head_start, head_end = connection.lane.response_heads.split_around_request_id(
                    200, bytes(headers)
                )
            except TsxError as error:
                self.refuse(error)
                self.leave()  # Further parts are dropped.
                return
            self._flow = flow
            self._is_event_stream = errors.is_event_stream(bytes(headers))
            self.plain = False
            connection.lane.counts.add(200)
            close = b"" if self.keep_alive else CLOSE
            connection.write(
                b"%b%b%b%b%btransfer-encoding: chunked\r\n\r\n"
                % (head_start, self.request_id, self._extra_lines, head_end, close)
            )
        if body:
            connection.write(b"".join((b"%x\r\n" % len(body), body, b"\r\n")))
        if connection.write_paused and not self._is_paused:
            self._is_paused = True
            flow.hold(self)

    def resume_stream(self) -> None:
        """Let the worker send more parts, because the client has read enough or has left."""
        if self._is_paused and self._flow is not None:
            self._is_paused = False
            self._flow.release(self)

    def _log_broken_stream(self, reason: str) -> None:
        log_fields = {"request_id": self.request_id.decode(), "model": self.served_by().name}
        logger.warning(
            "request %s: its stream was interrupted: %s",
            log_fields["request_id"],
            reason,
            extra=log_fields,
        )

    def _end_stream(self, status: int, body: Buffer) -> None:
        self.resume_stream()
        connection = self.connection
        if status >= 400:  # The handler has failed, and the body is its error.
            self._break_off(str(body, "utf-8", "replace"))
        else:
            connection.finish(_last_chunk(body), self.keep_alive)

    def _break_off(self, reason: str) -> None:
        """Close a stream before its end, so that the client notices the error.

        A stream of server-sent events ends with an error event, which OpenAI's clients expect.
        """
        self._log_broken_stream(reason)
        if self._is_event_stream:
            self.connection.finish(_last_chunk(errors.error_event(reason)), self.keep_alive)
        else:
            self.connection.abort()


def _last_chunk(body: Buffer) -> bytes:
    """Return a response's last chunk and the empty chunk that ends the body."""
    return b"".join((b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n")) if body else b"0\r\n\r\n"
