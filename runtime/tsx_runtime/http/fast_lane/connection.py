"""The fast lane: a uvicorn protocol that connects sockets directly to the queues of models.

A plain request that runs a model (HTTP/1.1, a body with a Content-Length) needs no parser
callbacks, scope, task or event of an ASGI server. Its head is looked up in a cache, or parsed
(`heads.py`). Its body is cut from the stream by its length, and a job is submitted to the model's
queue. All other requests, and all invalid ones, are passed byte for byte to uvicorn's protocol and
so to FastAPI, which has the same routes. This is called the other lane. It also handles chunked
bodies, HEAD, OPTIONS, HTTP/1.0, a body over the limit and a missing token. Errors are defined in
one place, so both lanes respond alike.

`Phase` and the table at the end of this file define the reactions of a connection in each phase. A
connection runs one request at a time. If a client sends further requests ahead, their bytes are
stored up to a limit (`read_flow.py`), so that responses keep their order. uvicorn's parser gets the
bytes of one request at a time, as far as its end is known, because it would queue a task for each
request in its input. One turn of the event loop begins at most one stored request of a connection,
and stored requests of a few connections (`http/turns.py`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

from tsx_runtime.api.access.client_limits import REFUSAL_DELAY_S, Client, ClientLimits
from tsx_runtime.api.errors import converter_for_meta
from tsx_runtime.api.headers import new_request_id
from tsx_runtime.api.messages import MAX_HEADERS, MAX_PIECES
from tsx_runtime.api.request_options import deadline
from tsx_runtime.core.scheduling.byte_budget import MAX_UNCOUNTED_BYTES
from tsx_runtime.errors import (
    BadRequest,
    HeadTooLarge,
    InvalidToken,
    NoRoom,
    SlowRequest,
    TooManyRequests,
    TsxError,
)
from tsx_runtime.http.fast_lane.cased_protocol import CasedProtocol
from tsx_runtime.http.fast_lane.exchange import Exchange
from tsx_runtime.http.fast_lane.heads import Head, RefusalRoute, cannot_be_head
from tsx_runtime.http.fast_lane.lane import LaneApp
from tsx_runtime.http.fast_lane.observed_exchange import exchange_factory
from tsx_runtime.http.fast_lane.read_flow import ReadFlow
from tsx_runtime.http.turns import LARGE_READ_BYTES
from tsx_runtime.wire import MAX_COPIED_BYTES, Body, Buffer, Parts

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

    from tsx_runtime.core.scheduling.job import Route

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LINE_END = b"\r\n"
EMPTY_LINES = re.compile(rb"[\r\n]*")
HEAD_END = b"\r\n\r\n"  # the end of each head and of each chunked body
# The parser gets at least this many bytes of a body at once. A larger
# minimum would let more requests that follow the body into the same piece.
MIN_PIECE_BYTES = 512
MAX_PIECE_BYTES = 4096  # most bytes of a head or a chunked body that the parser gets at once
# allowed bytes of chunk sizes, extensions and trailers for each byte of content
MAX_FRAMING_PER_BYTE = 8
CALLBACKS_PER_TURN = 256  # headers and chunks that are parsed in one turn


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """A phase of a connection: its reactions to received bytes and to the clock's ticks."""

    on_data: Callable[[FastLane, bytes], None]
    on_tick: Callable[[FastLane], None]
    is_parsing: bool = False  # whether uvicorn's parser is within a message
    awaits_body: bool = False  # whether a stopping server reads the rest of the body


class ResponseTransport:
    """The transport for uvicorn's cycle; `close` waits until the request's body is read.

    After an earlier close, the client could lose the response (RFC 9112, section 9.6).
    """

    def __init__(self, connection: FastLane, cycle: RequestResponseCycle) -> None:
        self._connection, self._cycle = connection, cycle
        self.is_closing = connection.transport.is_closing

    def write(self, data: bytes) -> None:
        # Invalid bytes after the request may have closed it, and uvloop would raise an error.
        if not self.is_closing():
            self._connection.transport.write(data)

    def close(self) -> None:
        """Close the connection after the body, or at once if the response is incomplete."""
        if self._cycle.response_complete:
            self._connection.close_after_body()
        else:
            self._connection.transport.close()


class FastLane(CasedProtocol):
    """A connection of the fast lane."""

    flow: ReadFlow

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._app = cast("LaneApp", config.app)  # `config.loaded_app` may be wrapped.
        self.lane = self._app.lane_of(server_state)
        self._new_exchange = exchange_factory(self.lane)
        self._phase = IDLE
        self._phase_s = 0  # seconds in this phase
        self._is_stopping = False  # whether the server stops and accepts no further request
        # Bytes after the current request. CPython deletes the front of a bytearray without moving
        # the rest.
        self._ahead = bytearray()
        self._is_turn_scheduled = (
            False  # whether a turn is scheduled that passes `_ahead` to the parser
        )
        # State of a request in the fast lane
        self._exchange: Exchange | None = None
        self._head: Head | None = None  # the head of a request whose body is incomplete
        self._pieces: list[Buffer] = []  # the received pieces of its body
        self._counted_bytes = 0  # bytes of its body that are taken from the budget
        # State of a body in either lane
        self._body_length = 0  # bytes of the whole body; 0 if it is unknown
        self._received_bytes = 0  # bytes of the body that have been received
        self._idle_s = 0  # seconds without new bytes of the body
        self._received_at_last_tick = -1  # received bytes of the body at the last tick
        # State of the request in uvicorn's parser
        self._head_size = 0  # bytes of its head; the last piece may not be counted
        self._framing_bytes = 0  # bytes of its chunked body that are not content
        self._callbacks = 0  # callbacks of the parser in this turn
        self._closes_after_body = False  # whether to close once the body is read
        self._unsent_bytes = 0  # bytes that the client had not read at the last tick
        # Limits per client. The client is None behind a proxy, which sends many clients' requests.
        self._limits: ClientLimits | None = None
        self._limited_client: Client | None = None

    # Methods that the event loop calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the clock, and refuse a client with too many connections."""
        super().connection_made(transport)
        self.flow = ReadFlow(transport, self.lane.turns)
        self._is_stopping = self._app.is_replaced
        self.lane.clock.start()
        if self.client is None or self.lane.clients is None:
            return
        self._limits = self.lane.clients
        if not self._limits.is_proxy(self.client[0]):
            try:
                self._limited_client = self._limits.connect(self.client[0])
            except TooManyRequests as error:
                self._give_up(error)

    def data_received(self, data: bytes) -> None:
        self._phase.on_data(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Withdraw the current request, and give its bytes back to the budget."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.destination.leave(exchange)
            exchange.leave()
        if self._limits is not None and self._limited_client is not None:
            self._limits.disconnect(self._limited_client)
            self._limited_client = None
        self._drop_body()
        self.lane.bytes_in_flight.set_unread(self, 0)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._count_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Continue with the response, or with the next request."""
        super().resume_writing()
        self.lane.bytes_in_flight.set_unread(self, 0)
        self._unsent_bytes = 0
        if self._exchange is not None:
            self._exchange.resume_stream()
        elif self._phase is RESPONSE:
            self._phase_s = 0
            self._next_request()

    def on_tick(self) -> None:
        """Check the timeouts; `http/connection_clock.py` calls this once a second."""
        self._phase_s += 1
        if self.flow.write_paused or self.transport.is_closing():
            self._check_writing()
        else:
            self._phase.on_tick(self)

    def shutdown(self) -> None:
        """Close after the current response, because the server stops; uvicorn calls this.

        If another server has replaced this one, the connection answers one more request first.
        """
        self._is_stopping = True
        if self._exchange is not None:
            self._exchange.close_after_response()
        elif not self._phase.awaits_body and not (
            self._app.is_replaced and (self.cycle is None or self.cycle.response_complete)
        ):
            super().shutdown()

    # Reading

    def _begin_request(self, data: bytes) -> None:
        """Handle bytes that begin a request."""
        end = data.find(HEAD_END) + 4
        if end < 4:
            data = data.lstrip(
                LINE_END
            )  # Empty lines before a request are ignored (RFC 9112, section 2.2).
            if not data:
                self._phase = IDLE
                return
            if cannot_be_head(data):
                self._pass_to_uvicorn(data, len(data))
                return
            self._ahead += data
            self._set_phase(HEAD)
            self._check_head_size(len(data))
            return
        entry = None
        heads = self.lane.heads
        if heads is not None:
            raw = data[:end]
            try:
                entry = heads.entries[raw]
            except KeyError:
                entry = heads.read(raw)
        if entry is None:
            if data[:1] in LINE_END:
                self._begin_request(data.lstrip(LINE_END))
            elif self._check_head_size(end) and self._check_header_count(
                data.count(b"\n", 0, end) - 2
            ):
                self._pass_to_uvicorn(data, end)
            return
        head, route = entry
        size = len(data) - end
        if size == head.length:
            if size <= MAX_COPIED_BYTES:
                self._submit(head, route, data[end:])
            else:
                self._submit_large(head, route, memoryview(data)[end:])
        elif size > head.length:
            self._store_ahead(memoryview(data)[end + head.length :])
            self._submit_large(head, route, data[end : end + head.length])
        elif isinstance(route, RefusalRoute):
            # The other lane can respond before the body is complete, and discard it.
            self._pass_to_uvicorn(data, end)
        else:
            self._head = head
            self._pieces = [memoryview(data)[end:]]
            self._body_length, self._received_bytes, self._received_at_last_tick, self._idle_s = (
                head.length,
                size,
                -1,
                0,
            )
            self._set_phase(BODY)
            if self._take_from_budget(head, size) and head.expects_continue:
                self.transport.write(CONTINUE)

    def _receive_head(self, data: bytes) -> None:
        self._ahead += data
        self._continue_ahead()

    def _receive_body(self, data: bytes) -> None:
        head, size = self._head, len(data)
        assert head is not None
        missing = head.length - self._received_bytes
        if size > missing:
            self._store_ahead(memoryview(data)[missing:])
            data = data[:missing]
        self._pieces.append(data)
        self._received_bytes += len(data)
        if head.length <= MAX_UNCOUNTED_BYTES or self._take_from_budget(head, len(data)):
            if len(self._pieces) > MAX_PIECES:
                self._pieces = [b"".join(self._pieces)]
            if self._received_bytes == head.length:
                self._submit_complete(head)
        if size > LARGE_READ_BYTES:
            self.flow.yield_turn()

    def _submit_complete(self, head: Head) -> None:
        pieces, self._head, self._pieces = self._pieces, None, []
        body = b"".join(pieces) if head.length <= MAX_COPIED_BYTES else Parts(pieces, head.length)
        assert self.lane.heads is not None
        try:
            route = self.lane.heads.find_again(head)
        except TsxError as error:  # The model has been unregistered since the head was read.
            self._give_up(error)
        else:
            self._submit(head, route, body)

    def _submit_large(self, head: Head, route: Route, body: Body) -> None:
        """Submit a request whose body is complete and may be large."""
        self._body_length = self._received_bytes = head.length
        if self._take_from_budget(head, head.length):
            self._submit(head, route, body)

    def _submit(self, head: Head, route: Route, body: Body) -> None:
        if self._limits is not None:
            route = self._apply_limits(self._limits, head, route)
        self._exchange = exchange = self._new_exchange(self, head, body, monotonic())
        if route.client_timeout or head.timeout_ms is not None:
            exchange.deadline = deadline(exchange.arrived, route.client_timeout, head.timeout_ms)
        if head.priority:
            exchange.priority = head.priority
        if head.timing is not None:
            exchange.time(head.timing)
        if self._is_stopping:
            exchange.close_after_response()
        if self._counted_bytes:
            exchange.set_counted_bytes(self._counted_bytes)
            self._counted_bytes = 0
        exchange.destination = route
        self._phase = RESPONSE
        route.submit(exchange)

    def _apply_limits(self, limits: ClientLimits, head: Head, route: Route) -> Route:
        """Count a request, and return its route, or a route that refuses it due to the limits."""
        assert self.client is not None
        client = self._limited_client
        if client is None:
            client = limits.caller(self.client[0], head.headers)
        try:
            limits.count_request(client)
            if (
                isinstance(route, RefusalRoute)
                and isinstance(route.error, InvalidToken)
                and route.error.has_token
            ):
                limits.count_failure(client)
        except TooManyRequests as error:
            return RefusalRoute(error, REFUSAL_DELAY_S)
        return route

    # Responses: the methods of `exchange.Connection`

    @property
    def write_paused(self) -> bool:
        return self.flow.write_paused

    def write(self, data: Buffer) -> None:
        # asyncio logs a warning for each write to a closed transport.
        if not self.transport.is_closing():
            self.transport.write(data)

    def finish(self, data: Buffer, keep_alive: bool) -> None:
        self._exchange = None
        transport = self.transport
        transport.write(data)
        if not keep_alive:
            self._phase = IDLE
            transport.close()
            return
        self._phase_s = 0
        if self.flow.write_paused:
            return  # The next request begins once the client has read this response.
        if self._ahead:
            self._next_request()
        else:
            self._phase = IDLE

    def abort(self) -> None:
        self._exchange = None
        self.transport.close()

    # Bytes that were sent ahead

    def _store_ahead(self, data: bytes | memoryview) -> None:
        """Store bytes that follow the current request."""
        self._ahead += data
        self.flow.limit(len(self._ahead))

    def _take_ahead(self, end: int) -> bytes:
        """Remove and return the stored bytes before `end`, or all of them for -1."""
        ahead = self._ahead
        if not 0 <= end < len(ahead):
            data, self._ahead = bytes(ahead), bytearray()
        else:
            data = bytes(memoryview(ahead)[:end])
            del ahead[:end]
        self.flow.limit(len(self._ahead))
        return data

    def _next_request(self) -> None:
        """Schedule the next request that was sent ahead, or wait for one."""
        if self._ahead:
            self._phase = HEAD
            # A direct call would nest responses without limit. It would also run in the context of
            # the previous request, and thus with its client and span.
            self.lane.turns.call_soon(self._continue_ahead)
        else:
            self._phase = IDLE

    def _continue_ahead(self) -> None:
        """Begin the first stored request, or pass the next stored bytes to uvicorn's parser."""
        if self._is_turn_scheduled:
            self._is_turn_scheduled = False
            self._feed_ahead()
            self._finish_uvicorn()
            return
        if self.transport.is_closing() or self._phase is not HEAD:
            return
        ahead = self._ahead
        if ahead[:1] in LINE_END and (empty := EMPTY_LINES.match(ahead)):
            del ahead[: empty.end()]
        position = ahead.find(HEAD_END)
        if position >= 0:
            self._begin_request(self._take_ahead(self._end_of_request(position + len(HEAD_END))))
        elif not ahead or cannot_be_head(ahead):
            self._begin_request(self._take_ahead(-1))
        elif self._check_head_size(len(ahead)):
            self.flow.release()

    def _end_of_request(self, end: int) -> int:
        """Return the end of the stored request whose head ends at `end`; if unknown, `end`."""
        heads = self.lane.heads
        entry = None if heads is None else heads.look_up(bytes(memoryview(self._ahead)[:end]))
        return end if entry is None else end + entry[0].length

    # Requests of the other lane

    def _pass_to_uvicorn(self, data: bytes, end: int) -> None:
        """Pass a request whose head ends at `end` to uvicorn's parser."""
        self._set_phase(UVICORN)
        if end < len(data):
            self._store_ahead(memoryview(data)[end:])
            data = data[:end]
        self._parse_piece(data)
        self._feed_ahead()
        self._finish_uvicorn()

    def _feed_parser(self, data: bytes) -> None:
        """Pass bytes of the current message to uvicorn's parser."""
        if self._is_turn_scheduled:
            self._store_ahead(data)
        # These bytes contain at most the end of the current request.
        elif len(data) <= self._body_length - self._received_bytes or (
            len(data) <= MAX_PIECE_BYTES and HEAD_END not in data
        ):
            self._parse_piece(data)
        else:
            self._ahead += data
            self._feed_ahead()
        self._finish_uvicorn()
        if len(data) > LARGE_READ_BYTES and self._phase.is_parsing and not self.flow.read_paused:
            self.flow.yield_turn()

    def _feed_ahead(self) -> None:
        self._callbacks = 0
        while self._ahead and self._phase.is_parsing and not self.transport.is_closing():
            if self._callbacks > CALLBACKS_PER_TURN:
                self._is_turn_scheduled = self.flow.is_over_limit = True
                self.flow.pause_reading()
                self.lane.turns.call_soon(self._continue_ahead)
                return
            self._parse_piece(self._take_ahead(self._end_of_piece()))
        self.flow.limit(len(self._ahead))

    def _end_of_piece(self) -> int:
        """Return the number of stored bytes that surely contain no second request."""
        if self._body_length > self._received_bytes:
            return self._body_length - self._received_bytes
        position = self._ahead.find(
            HEAD_END, 0 if self._phase is UVICORN_HEAD else MIN_PIECE_BYTES, MAX_PIECE_BYTES
        )
        return position + len(HEAD_END) if position >= 0 else MAX_PIECE_BYTES

    def _parse_piece(self, data: bytes) -> None:
        phase_before, received, scope_before = self._phase, self._received_bytes, self.scope
        super().data_received(data)
        phase_after = self._phase
        if phase_before is UVICORN_HEAD and phase_after is UVICORN_HEAD:
            self._head_size += len(data)
            self._check_head_size(self._head_size)
        # If another request has begun in `data`, the scope is a new one.
        elif (
            phase_before.is_parsing
            and phase_before is not UVICORN_HEAD
            and phase_after.is_parsing
            and not self._body_length
            and self.scope is scope_before
        ):
            self._framing_bytes += len(data) - (self._received_bytes - received)
            if (
                self._framing_bytes - MAX_FRAMING_PER_BYTE * self._received_bytes
                > self.lane.max_head
            ):
                self._give_up(
                    HeadTooLarge(
                        "Sizes, extensions and trailers of the request's chunks have more than"
                        f" {MAX_FRAMING_PER_BYTE} bytes for each byte of content and those of"
                        f" max_header_size, which is {self.lane.max_head} bytes. Send larger"
                        " chunks."
                    )
                )

    def _finish_uvicorn(self) -> None:
        """Continue with the next request if uvicorn has answered the current one."""
        if (
            self._phase is UVICORN
            and not self.pipeline
            and (self.cycle is None or self.cycle.response_complete)
        ):
            self._set_phase(IDLE)
            self._next_request()

    def close_after_body(self) -> None:
        """Close now, or once the parser has read the current body."""
        if self._phase.is_parsing:
            self._closes_after_body = True
        else:
            self.transport.close()

    # Methods that uvicorn's parser and cycle call

    def on_message_begin(self) -> None:
        self._set_phase(UVICORN_HEAD)
        self._received_bytes = self._body_length = self._head_size = self._framing_bytes = (
            self._idle_s
        ) = 0
        self._received_at_last_tick = -1
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._callbacks += 1
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start uvicorn's cycle, with a transport that closes only after the body."""
        self._body_length = _plain_length(self.headers)
        super().on_headers_complete()
        self._phase = UVICORN_BODY
        if self.cycle is not None:
            self.cycle.transport = cast("asyncio.Transport", ResponseTransport(self, self.cycle))
            if self._is_stopping:
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._callbacks += 1
        self._received_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase = UVICORN
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._finish_uvicorn()
        if self._phase is not UVICORN and not self._phase.is_parsing:
            self._unset_keepalive_if_required()  # The clock checks this timeout instead.

    def _should_upgrade_to_ws(self) -> bool:
        return self.parser.get_method() == b"GET" and self.lane.max_message_size > 0

    def handle_websocket_upgrade(self) -> None:
        """Pass the transport to a `WebSocketConnection`."""
        # The import takes 20 ms, and most servers have no WebSockets.
        from tsx_runtime.http.websocket import WebSocketConnection

        lines = [
            b"%b: %b\r\n" % (name, value)
            for name, (_, value) in zip(self._names, self.headers, strict=True)
        ]
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (self.parser.get_method(), self.url, b"".join(lines))
        lane = self.lane
        try:
            connection = WebSocketConnection(
                head,
                self.server_state,
                lane.max_message_size,
                lane.bytes_in_flight,
                lane.timeouts,
                lane.turns,
                self.connection_lost,
            )
        except BadRequest as error:
            self._give_up(error)
            return
        self.connections.discard(self)
        path, _, query = self.url.partition(b"?")
        url_fields = {
            "path": self.config.root_path + unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
        }
        ahead = self._take_ahead(-1)
        self.flow.detach()
        connection.start(self.transport, self.config.loaded_app, {**self.scope, **url_fields})
        if ahead:
            connection.data_received(ahead)

    # Limits of time

    def _check_keep_alive(self) -> None:
        if self._phase_s > self.lane.timeouts.keep_alive:
            self.transport.close()

    def _check_head(self) -> None:
        timeout = self.lane.timeouts.head
        if self._phase_s > timeout:
            self._give_up(
                SlowRequest(
                    f"The request's headers did not arrive within {timeout} s (header_timeout)."
                )
            )

    def _check_body(self) -> None:
        timeouts, received = self.lane.timeouts, self._received_bytes
        self._idle_s = self._idle_s + 1 if received == self._received_at_last_tick else 0
        self._received_at_last_tick = received
        if self._phase_s > timeouts.body + received / timeouts.body_rate:
            self._give_up(
                SlowRequest(
                    f"The request's body came too slowly: {received} bytes in {self._phase_s} s"
                    " (body_timeout)."
                )
            )
        elif self._idle_s >= timeouts.body_idle:
            text = (
                f"Nothing of the request's body came for {timeouts.body_idle} s"
                f" (body_idle_timeout), after {received} bytes of it."
            )
            self._give_up(SlowRequest(text))

    def _check_uvicorns_body(self) -> None:
        if self.cycle.response_started:
            self._set_phase(UVICORN_REFUSED)
        elif not self.flow.read_paused:
            self._check_body()

    def _check_refused(self) -> None:
        """Close after the body timeout; discarded bytes do not extend it."""
        if self._phase_s > self.lane.timeouts.body:
            self.transport.close()

    def _ignore_tick(self) -> None:
        """Do nothing while a model runs; `_check_writing` handles slow clients."""

    def _check_writing(self) -> None:
        size = self.transport.get_write_buffer_size()
        if size < self._unsent_bytes or self._unsent_bytes == 0:
            self._phase_s = 0
        elif self._phase_s > self.lane.timeouts.write:
            self.transport.abort()
        self._unsent_bytes = size
        self._count_unread(size)

    # Limits of size

    def _count_unread(self, size: int) -> None:
        budget = self.lane.bytes_in_flight
        budget.set_unread(self, size)
        if budget.overdrawn:
            self.loop.call_soon(
                budget.shed
            )  # A write may be in progress here, so connections are closed later.

    def cut_off(self) -> None:
        """Abort the connection, because its unread responses exceed the budget."""
        self.transport.abort()

    def _take_from_budget(self, head: Head, received: int) -> bool:
        """Take received bytes of a body from the budget, or refuse the request.

        The first call also checks that the budget has room for the whole body.
        """
        if head.length <= MAX_UNCOUNTED_BYTES:
            return True
        budget = self.lane.bytes_in_flight
        try:
            if not self._counted_bytes:
                budget.check(head.length)
            budget.take(received)
        except NoRoom as error:
            self._refuse_body(error, head)
            return False
        self._counted_bytes += received
        return True

    def _check_head_size(self, size: int) -> bool:
        if size > self.lane.max_head:
            self._give_up(
                HeadTooLarge(
                    "The request's headers are larger than max_header_size, which is"
                    f" {self.lane.max_head} bytes."
                )
            )
        return size <= self.lane.max_head

    def _check_header_count(self, count: int) -> bool:
        if count > MAX_HEADERS:
            self._give_up(
                HeadTooLarge(f"The request has {count} headers; the limit is {MAX_HEADERS}.")
            )
        return count <= MAX_HEADERS

    def _give_up(self, error: TsxError) -> None:
        """Send an error for an incomplete request, and close."""
        if self.transport.is_closing():
            return
        # Until the head is complete, uvicorn's cycle is still that of the previous request.
        in_body = self._phase.is_parsing and self._phase is not UVICORN_HEAD
        if self.cycle is None or (
            not self.cycle.response_started if in_body else self.cycle.response_complete
        ):
            status, answer = self.lane.response_heads.refusal(
                new_request_id(), error, keep_alive=False
            )
            self.lane.counts.add(status)
            self.transport.write(answer)
        self._drop_body()
        self.transport.close()

    def _refuse_body(self, error: NoRoom, head: Head) -> None:
        """Refuse a request at once, and discard the rest of its body.

        If the connection were closed at once, a client that still sends could lose the response.
        """
        lane = self.lane
        error.more = self._received_bytes < head.length
        keep_alive = head.keep_alive and not self._is_stopping
        status, answer = lane.response_heads.refusal(
            new_request_id(), error, error.more or keep_alive, converter_for_meta(head.meta)
        )
        lane.counts.add(status)
        self._drop_body()
        if not error.more:
            self._phase = RESPONSE
            self.finish(answer, keep_alive)
            return
        self.transport.write(answer)
        if head.expects_continue and not self._received_bytes:
            self._body_length = 0  # Without "100 Continue", the client sends no body.
        self._set_phase(REFUSED)
        self._discard(b"")

    def _discard(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes >= self._body_length:
            self.transport.close()
        elif len(data) > LARGE_READ_BYTES:
            self.flow.yield_turn()

    def _drop_body(self) -> None:
        self._head, self._pieces = None, []
        self.lane.bytes_in_flight.give(self._counted_bytes)
        self._counted_bytes = 0

    def _set_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._phase_s = 0


def _plain_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Return the Content-Length, or 0 if there is none or the body is chunked."""
    length = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return 0
        if name == b"content-length" and value.isdigit():
            length = int(value)
    return length


# There is no current request; the next bytes begin one.
IDLE = Phase(FastLane._begin_request, FastLane._check_keep_alive)
# Part of a head has been received.
HEAD = Phase(FastLane._receive_head, FastLane._check_head)
# The head of a plain request is complete, and its body is not.
BODY = Phase(FastLane._receive_body, FastLane._check_body, awaits_body=True)
# A model runs a plain request, or the client has not read the response yet.
RESPONSE = Phase(FastLane._store_ahead, FastLane._ignore_tick)
# A request was refused before its body was complete; the rest is discarded.
REFUSED = Phase(FastLane._discard, FastLane._check_refused, awaits_body=True)
# uvicorn's protocol reads a head, a body, or the rest of a body after its response has begun. In
# the last phase, the request is complete and its response is not.
UVICORN_HEAD = Phase(FastLane._feed_parser, FastLane._check_head, is_parsing=True)
UVICORN_BODY = Phase(FastLane._feed_parser, FastLane._check_uvicorns_body, is_parsing=True)
UVICORN_REFUSED = Phase(FastLane._feed_parser, FastLane._check_refused, is_parsing=True)
UVICORN = Phase(FastLane._store_ahead, FastLane._ignore_tick)
