"""One request of the fast lane, from submission to answer: the core's job, which writes the answer
to its connection.
"""

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

# an answer beyond this size lies in memory of its own (see `core.channel`) and is sent from there,
# uncopied
LARGE = MAX_SMALL_BYTES

logger = logging.getLogger("tsx.http")


class Connection(Protocol):
    """The part of a connection that an exchange uses."""

    lane: Lane

    @property
    def client(self) -> tuple[str, int] | None:
        """None at a unix socket."""

    @property
    def scheme(self) -> str | None: ...

    @property
    def write_paused(self) -> bool:
        """Whether the client has yet to take what was written."""

    def write(self, data: Buffer) -> None:
        """Write a part of an answer."""

    def finish(self, last: Buffer, keep_alive: bool) -> None:
        """Write the last bytes of an answer, and turn to the next request."""

    def abort(self) -> None:
        """End a streamed answer without its end, so that the client can tell."""


class Exchange(Job):
    """Writes its answer to the connection that it came from, which handles one at a time."""

    _added = b""  # header lines of the server's own
    _timing: TimingRequest | None = None
    _flow: Flow | None = None  # once the answer streams
    _held = False
    _events = False  # and is one of server-sent events
    _counted = 0

    def __init__(self, connection: Connection, head: Head, body: Body, arrived: float) -> None:
        self.connection = connection
        self.request_id = request_id = new_request_id()
        self.meta = request_id + head.meta
        self.body = body
        self.arrived = arrived
        self.keep_alive = self.plain = head.keep_alive

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        connection = self.connection
        lane = connection.lane
        if (
            status == 200
            and self.plain
            and len(body) <= LARGE
            and (not headers or headers == JSON_HEADER)
        ):  # nearly every answer
            heads = lane.response_heads
            if heads.server_state.default_headers is not heads.default:
                heads.renew()
            lane.counts.plain += 1
            tails = heads.json_tails if headers else heads.tails
            connection.finish(
                b"".join((heads.before, self.request_id, tails[len(body)], body)), True
            )
        else:
            self._give_back()
            if not self.gone:
                self._answer_otherwise(status, headers, body, batch)

    def route(self, version: Any, added: bytes) -> None:
        self.routed, self._added, self.plain = version, added, False

    def served_by(self) -> ModelVersion:
        """The version serving this request: picked by the splitter, or addressed directly."""
        return cast("ModelVersion", self.routed or self.destination)

    def time(self, request: TimingRequest) -> None:
        self._timing = request
        self.plain = False

    def count(self, size: int) -> None:
        """So many bytes of its body are taken from the server's budget."""
        self._counted = size
        self.plain = False  # so that all ways of answering give them back

    def _give_back(self) -> None:
        counted, self._counted = self._counted, 0
        if counted:
            self.connection.lane.bytes_in_flight.give(counted)

    def close_after(self) -> None:
        """This is the last answer of its connection."""
        self.keep_alive = self.plain = False

    def leave(self) -> None:
        """The client is gone."""
        self.gone = True
        self.plain = False
        self.go_on()

    def _answer_otherwise(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        timing = b"" if self._timing is None else timing_header(self._timing, self, status, batch)
        if self._flow is not None:
            self._end_stream(status, body)
            return
        connection = self.connection
        lane = connection.lane
        try:
            before, behind = lane.response_heads.split_around_request_id(
                status, bytes(headers) + self._added
            )
        except TsxError as error:
            self.refuse(error)
            return
        if status >= 400 and (form := errors.form_of_meta(self.meta)) is not None:
            body = form(bytes(body))
        if status == 205:
            # it tells a client to empty its form, and has no content (RFC 9110, section 15.3.6)
            body = b""
        lane.counts.add(status)
        close = b"" if self.keep_alive else CLOSE
        if timing:
            close = timing + close
        if status in (204, 304):
            connection.finish(
                b"%b%b%b%b\r\n" % (before, self.request_id, behind, close), self.keep_alive
            )
        elif len(body) <= LARGE:
            length = b"content-length: %d\r\n%b\r\n" % (len(body), close)
            connection.finish(
                b"".join((before, self.request_id, behind, length, body)), self.keep_alive
            )
        else:
            connection.write(
                b"%b%b%bcontent-length: %d\r\n%b\r\n"
                % (before, self.request_id, behind, len(body), close)
            )
            connection.finish(body, self.keep_alive)

    def refuse(self, error: TsxError) -> None:
        self._give_back()
        if self.gone:
            return
        connection = self.connection
        if self._flow is not None:
            self.go_on()
            self._break_off(error.message)
            return
        form = errors.form_of_meta(self.meta)
        status, answer = connection.lane.response_heads.refusal(
            self.request_id, error, self.keep_alive, form, self._added
        )
        connection.lane.counts.add(status)
        connection.finish(answer, self.keep_alive)

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        if self.gone:
            return
        connection = self.connection
        if self._flow is None:
            try:
                before, behind = connection.lane.response_heads.split_around_request_id(
                    200, bytes(headers) + self._added
                )
            except TsxError as error:
                self.refuse(error)
                self.leave()  # of what follows, nothing is for this client any more
                return
            self._flow = flow
            self._events = errors.is_event_stream(bytes(headers))
            self.plain = False
            connection.lane.counts.add(200)
            close = b"" if self.keep_alive else CLOSE
            connection.write(
                b"%b%b%b%btransfer-encoding: chunked\r\n\r\n"
                % (before, self.request_id, behind, close)
            )
        if body:
            connection.write(b"".join((b"%x\r\n" % len(body), body, b"\r\n")))
        if connection.write_paused and not self._held:
            self._held = True
            flow.hold(self)

    def go_on(self) -> None:
        """The client has taken what was written, or has left: the worker may send more."""
        if self._held and self._flow is not None:
            self._held = False
            self._flow.release(self)

    def _tell_broken(self, why: str) -> None:
        about = {"request_id": self.request_id.decode(), "model": self.served_by().name}
        logger.warning(
            "request %s: its stream was interrupted: %s", about["request_id"], why, extra=about
        )

    def _end_stream(self, status: int, body: Buffer) -> None:
        self.go_on()
        connection = self.connection
        if status >= 400:  # the handler failed in the middle: its error is no part of the answer
            self._break_off(str(body, "utf-8", "replace"))
        else:
            connection.finish(_last(body), self.keep_alive)

    def _break_off(self, why: str) -> None:
        """Without an end, so that the client can tell; of events, an error is the last, as OpenAI's
        clients expect it.
        """
        self._tell_broken(why)
        if self._events:
            self.connection.finish(_last(errors.error_event(why)), self.keep_alive)
        else:
            self.connection.abort()


def _last(body: Buffer) -> bytes:
    """The last part of an answer in chunks, and their end."""
    return b"".join((b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n")) if body else b"0\r\n\r\n"
