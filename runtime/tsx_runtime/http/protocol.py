"""The fast lane: from a connection's bytes straight to a model's queue, and from its answer straight to the connection.

A uvicorn protocol class. Requests that run a model and are plain (HTTP/1.1, a body whose length is told before) never meet the
parser callbacks, scopes, tasks and events of an ASGI server: their head is looked up or read once (`heads.py`), their
body is cut from the stream by its length, and a job goes to the model's queue. Everything else, and everything that is
wrong, is handed byte for byte to uvicorn's own protocol and so to FastAPI, which has the same routes; there is one place that
says what is an error, and both lanes answer alike. (Chunked bodies, HEAD, OPTIONS, HTTP/1.0, a body over the limit, a missing token
and an unknown model go there.)

A connection is in one of five phases:

    BETWEEN   nothing under way; the next bytes begin a request
    HEAD      part of a head is there
    BODY      the head of a plain request is there, part of its body is missing
    ANSWER    a plain request is with the model, or its answer not taken yet; what the client sends meanwhile waits, so that
              answers keep their order and do not pile up
    UVICORN   uvicorn's own protocol has the connection until it has read and answered what it was given
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from tsx_runtime.errors import HeadTooLarge, SlowRequest, TsxError
from tsx_runtime.http.access import LoggedExchange, some_logged
from tsx_runtime.http.asgi import new_request_id
from tsx_runtime.http.asks import sometimes_timed
from tsx_runtime.http.casing import CasedProtocol
from tsx_runtime.http.exchange import Exchange
from tsx_runtime.http.heads import END, Head, Heads, cannot_be_head
from tsx_runtime.http.limits import deadline
from tsx_runtime.http.lines import Lines
from tsx_runtime.http.timeouts import SLOWEST, Clock
from tsx_runtime.http.traced import some_traced
from tsx_runtime.wire import COPIED, Body, Buffer, Parts

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from tsx_runtime.core.model import ModelVersion
    from tsx_runtime.core.split import Route
    from tsx_runtime.http.app import ServerApp

MOST_PIECES = 1024  # of one body, which a client may send byte by byte
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
AHEAD = 64 << 10  # bytes that a client may send ahead of the answer it waits for before it is no longer read from


class Phase(enum.IntEnum):
    BETWEEN = 0
    HEAD = 1
    BODY = 2
    ANSWER = 3
    UVICORN = 4


BETWEEN, HEAD, BODY, ANSWER, UVICORN = Phase


class Lane:
    """What the connections of one listener share."""

    def __init__(self, app: ServerApp, connections: Any) -> None:
        predictions = app.predictions
        if predictions is not None and predictions.guard is not None and predictions.guard.plugins:
            predictions = None  # what a plugin says of a head may be otherwise the next time, so none is remembered
        self.heads = (
            None
            if predictions is None
            else Heads(
                predictions.registry,
                predictions.guard,
                predictions.limit,
                app.max_header_size,
                traced=app.tracer is not None,
                platform=app.platform,
            )
        )
        self.counts = app.counts
        self.lines = Lines(app.cors)
        self.log = app.access_log
        self.exchange: Callable[..., Exchange] = Exchange
        if app.access_log is not None:
            self.exchange = LoggedExchange if app.access_log.share >= 1.0 else some_logged(app.access_log)
        if app.tracer is not None:
            self.exchange = some_traced(app.tracer, self.exchange)
        if app.server_timing_share > 0:
            self.exchange = sometimes_timed(self.exchange, app.server_timing_share)
        self.timeouts = app.timeouts
        self.max_head = app.max_header_size
        self.clock = Clock(connections)


class FastLane(CasedProtocol):
    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        app = cast("ServerApp", config.app)  # `config.loaded_app` may be wrapped
        if app.lane is None:
            app.lane = Lane(app, server_state.connections)
        self.lane: Lane = app.lane
        self._phase = BETWEEN
        self._ticks = 0  # seconds in this phase
        self._ahead = bytearray()  # bytes that came and are not looked at yet: part of a head, or what follows a request
        self._head: Head | None = None  # in the phase BODY
        self._pieces: list[Buffer] = []  # of its body
        self._filled = 0  # bytes in them
        self._exchange: Exchange | None = None
        self._route: Route | None = None  # where the last job went
        self._reading = False  # uvicorn's parser is within a message
        self._in_head = False  # and within its head, of which so many bytes have come at least:
        self._head_size = 0
        self._refused = False  # the message's body was, which still comes
        self._closing = False  # the server stops: no further request
        self._unsent = 0  # bytes of answers at the last tick that the client had not taken

    # What the event loop calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.lane.clock.start()

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase is BETWEEN:
            if self.timeout_keep_alive_task is not None:
                self._unset_keepalive_if_required()
            self._begin(data)
        elif phase is BODY:
            self._fill(data)
        elif phase is UVICORN:
            self._to_uvicorn(data)
        else:
            self._ahead += data
            if phase is HEAD:
                self._go_on()
            elif len(self._ahead) > AHEAD:
                self.flow.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            assert self._route is not None
            self._route.leave(exchange)
            exchange.leave()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent = 0
        if self._exchange is not None:
            self._exchange.go_on()
        elif self._phase is ANSWER:
            self._ticks = 0
            self._turn()

    def shutdown(self) -> None:
        """uvicorn's word that the server stops: answer what has begun, then close."""
        self._closing = True
        if self._exchange is not None:
            self._exchange.close_after()
        elif self._phase is not BODY:
            super().shutdown()

    # Reading

    def _begin(self, data: bytes) -> None:
        """`data` begins a request."""
        end = data.find(END) + 4
        if end < 4:
            data = data.lstrip(b"\r\n")  # empty lines before a request are nothing (RFC 9112, 2.2)
            if not data:
                self._phase = BETWEEN
                return
            if cannot_be_head(data):
                self._to_uvicorn(data)
                return
            self._ahead += data
            self._set_phase(HEAD)
            self._check_head_size(len(data))
            return
        known = None
        heads = self.lane.heads
        if heads is not None:
            raw = data[:end]
            try:
                known = heads.known[raw]
            except KeyError:
                known = heads.read(raw)
        if known is None:
            if self._check_head_size(end):
                self._to_uvicorn(data)
            return
        head, route = known
        have = len(data) - end
        if have == head.length:
            self._submit(head, route, data[end:] if have <= COPIED else memoryview(data)[end:])
        elif have > head.length:
            self._ahead += memoryview(data)[end + head.length :]
            self._submit(head, route, data[end : end + head.length])
        else:
            if head.waits_for_go:
                self.transport.write(GO_ON)
            self._head = head
            self._pieces = [memoryview(data)[end:]]
            self._filled = have
            self._set_phase(BODY)

    def _fill(self, data: bytes) -> None:
        head = self._head
        assert head is not None
        missing = head.length - self._filled
        if len(data) > missing:
            self._ahead += memoryview(data)[missing:]
            data = data[:missing]
        self._pieces.append(data)
        self._filled += len(data)
        if len(self._pieces) > MOST_PIECES:
            self._pieces = [b"".join(self._pieces)]
        if self._filled == head.length:
            pieces, self._head, self._pieces = self._pieces, None, []
            body = b"".join(pieces) if head.length <= COPIED else Parts(pieces, head.length)
            assert self.lane.heads is not None
            try:
                route = self.lane.heads.find_again(head)
            except TsxError as error:  # it was unregistered while the body came
                self._give_up(error)
            else:
                self._submit(head, route, body)

    def _submit(self, head: Head, route: Route, body: Body) -> None:
        self._exchange = exchange = self.lane.exchange(self, head, body, monotonic())
        if route.client_timeout or head.timeout_ms is not None:
            exchange.deadline = deadline(exchange.arrived, route.client_timeout, head.timeout_ms)
        if head.priority:
            exchange.priority = head.priority
        if head.asks is not None:
            exchange.ask(head.asks)
        if self._closing:
            exchange.close_after()
        self._route = route
        self._phase = ANSWER
        route.submit(exchange)

    # Answering

    def served_by(self, exchange: Exchange) -> ModelVersion:
        """Who answers it: whom a split has picked, or the version that it went to straight."""
        return cast("ModelVersion", exchange.routed or self._route)

    def finish(self, last: Buffer, keep_alive: bool) -> None:
        """Write the last bytes of an answer, and turn to the next request."""
        self._exchange = None
        transport = self.transport
        transport.write(last)
        if not keep_alive:
            self._phase = BETWEEN
            transport.close()
            return
        self._ticks = 0
        if self.flow.write_paused:
            return  # a client that does not read its answers gets no more of them
        if self._ahead:
            self._turn()
        else:
            self._phase = BETWEEN

    def _turn(self) -> None:
        """To the next request."""
        if self._ahead:
            self._phase = HEAD
            self.loop.call_soon(self._go_on)  # not at once: answers that are at hand would be nested without bound
        else:
            self._phase = BETWEEN

    def break_off(self) -> None:
        """End a streamed answer without its end, so that the client can tell."""
        self._exchange = None
        self.transport.close()

    def _go_on(self) -> None:
        """Look at what came meanwhile."""
        if self.transport.is_closing() or self._phase is not HEAD:
            return
        self.flow.resume_reading()
        if self._ahead.find(END) < 0 and not cannot_be_head(self._ahead):
            self._check_head_size(len(self._ahead))
            return
        data, self._ahead = bytes(self._ahead), bytearray()
        self._begin(data)

    # uvicorn's own protocol

    def _to_uvicorn(self, data: bytes) -> None:
        if self._phase is not UVICORN:
            self._set_phase(UVICORN)
        in_head = self._in_head
        super().data_received(data)
        if in_head and self._in_head:
            self._head_size += len(data)
            self._check_head_size(self._head_size)
        self._take_back()

    def _take_back(self) -> None:
        """The connection is between requests again once uvicorn has read and answered all that it was given."""
        if self._phase is UVICORN and not self._reading and not self.pipeline and (self.cycle is None or self.cycle.response_complete):
            self._set_phase(BETWEEN)

    def on_message_begin(self) -> None:
        self._reading = self._in_head = True
        self._ticks = self._filled = self._head_size = 0
        self._refused = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._filled += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reading = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._take_back()
        if self._phase is BETWEEN:
            self._unset_keepalive_if_required()  # the clock does that

    # Limits

    def on_tick(self) -> None:
        """A second has passed (see `timeouts.py`)."""
        self._ticks += 1
        phase, timeouts = self._phase, self.lane.timeouts
        if self.flow.write_paused or self.transport.is_closing():
            self._check_writing()
        elif phase is BETWEEN:
            if self._ticks > timeouts.keep_alive:
                self.transport.close()
        elif phase is HEAD or (phase is UVICORN and self._in_head):
            if self._ticks > timeouts.head:
                self._give_up(SlowRequest(f"The request's headers did not arrive within {timeouts.head} s (header_timeout)."))
        elif phase is UVICORN and self._reading and self.cycle.response_started and not self.cycle.response_complete:
            self._check_refused()
        elif phase is BODY or (phase is UVICORN and self._reading and not self.flow.read_paused):  # noqa: SIM102  # as the others
            if self._ticks > timeouts.body + self._filled / SLOWEST:
                self._give_up(SlowRequest(f"The request's body came too slowly: {self._filled} bytes in {self._ticks} s (body_timeout)."))

    def _check_refused(self) -> None:
        """What still comes of a body that was refused is thrown away, for a time that does not grow with it."""
        if not self._refused:
            self._refused, self._ticks = True, 0
        elif self._ticks > self.lane.timeouts.body:
            self.transport.close()

    def _check_writing(self) -> None:
        size = self.transport.get_write_buffer_size()
        if size < self._unsent or self._unsent == 0:
            self._ticks = 0
        elif self._ticks > self.lane.timeouts.write:
            self.transport.abort()
        self._unsent = size

    def _check_head_size(self, size: int) -> bool:
        if size > self.lane.max_head:
            self._give_up(HeadTooLarge(f"The request's headers are larger than max_header_size, which is {self.lane.max_head} bytes."))
            return False
        return True

    def _give_up(self, error: TsxError) -> None:
        """Answer a request that is not complete, and close."""
        if self.transport.is_closing():
            return
        within = self._phase is UVICORN and not self._in_head  # else uvicorn's cycle is that of the request before
        if self.cycle is None or (not self.cycle.response_started if within else self.cycle.response_complete):
            status, answer = self.lane.lines.refusal(self.server_state.default_headers, new_request_id(), error, keep_alive=False)
            self.lane.counts.add(status)
            self.transport.write(answer)
        self.transport.close()

    def _set_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._ticks = 0
