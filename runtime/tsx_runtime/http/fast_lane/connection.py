"""The fast lane: passes requests from a connection's bytes directly to a model's queue, and answers
directly to the connection.

A uvicorn protocol class. Requests that run a model and are plain (HTTP/1.1, a body with a
Content-Length) never meet the parser callbacks, scopes, tasks and events of an ASGI server: their
head is looked up or read once (`heads.py`), their body is cut from the stream by its length, and a
job goes to the model's queue. Everything else, and everything that is wrong, is handed byte for
byte to uvicorn's own protocol and so to FastAPI, which has the same routes; errors are defined in
one place, and both lanes answer alike. (Chunked bodies, HEAD, OPTIONS, HTTP/1.0, a body over the
limit, a missing token and an unknown model go there.)

`Phase` and the table at the end of this file say what a connection does in each of its phases. One
request is under way at a time. What a client sends ahead of its answer waits as bytes, within a
bound (`read_flow.py`), so that answers keep their order and do not pile up. uvicorn's parser gets
the bytes up to the end of one request, as far as that can be seen: by itself it would queue a
task's worth of objects for each request in a read, without a bound. One turn of the event loop
begins one of the requests sent ahead at most; a few connections have such a turn at once
(`turns.py`).
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
from tsx_runtime.api.errors import form_of_meta
from tsx_runtime.api.headers import new_request_id
from tsx_runtime.api.messages import MAX_HEADERS, MAX_PIECES
from tsx_runtime.api.request_options import deadline
from tsx_runtime.core.scheduling.byte_budget import UNCOUNTED
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
from tsx_runtime.http.fast_lane.observed_exchange import new_exchange_of
from tsx_runtime.http.fast_lane.read_flow import ReadFlow
from tsx_runtime.http.turns import LARGE
from tsx_runtime.wire import COPIED, Body, Buffer, Parts

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

    from tsx_runtime.core.scheduling.job import Route

GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
LINE_END = b"\r\n"
EMPTY_LINES = re.compile(rb"[\r\n]*")
END = b"\r\n\r\n"  # of each head, and of each chunked body
# The parser gets at least so many bytes of a body at once, so that few requests begin behind the
# body in the same piece.
SLICE = 512
PIECE = 4096  # the most bytes of a head or a chunked body that the parser gets at once
FRAMING_PER_BYTE = 8  # bytes of chunk sizes, extensions and trailers for each byte of content
CALLBACKS_PER_TURN = 256  # headers and chunks before other connections have their turn


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """What a connection does with bytes that come, and when another second has passed.

    `parsing`: uvicorn's parser is within a message. `waits`: a server that stops lets the client
    send the rest of its body.
    """

    on_data: Callable[[FastLane, bytes], None]
    on_tick: Callable[[FastLane], None]
    parsing: bool = False
    waits: bool = False


class ResponseTransport:
    """The transport that uvicorn's cycle writes to.

    It closes once the body is read: before, the client could lose the answer (RFC 9112, 9.6).
    """

    def __init__(self, connection: FastLane, cycle: RequestResponseCycle) -> None:
        self._connection, self._cycle = connection, cycle
        self.is_closing = connection.transport.is_closing

    def write(self, data: bytes) -> None:
        # What came behind the request may have ended the connection: uvloop would raise.
        if not self.is_closing():
            self._connection.transport.write(data)

    def close(self) -> None:
        if self._cycle.response_complete:
            self._connection.close_after_body()
        else:  # the client sees by the early end that the answer is incomplete
            self._connection.transport.close()


class FastLane(CasedProtocol):
    flow: ReadFlow

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._app = cast("LaneApp", config.app)  # `config.loaded_app` may be wrapped
        self.lane = self._app.lane_of(server_state)
        self._new_exchange = new_exchange_of(self.lane)
        self._phase = BETWEEN
        self._ticks = 0  # seconds in this phase
        self._closing = False  # the server stops: no further request
        # Bytes that no request was begun with yet. (CPython deletes from the front of a bytearray
        # without moving the rest.)
        self._ahead = bytearray()
        self._has_turn = False  # a turn is scheduled, in which the parser gets the bytes ahead
        # The request of the fast lane
        self._exchange: Exchange | None = None
        self._head: Head | None = None  # while its body comes
        self._pieces: list[Buffer] = []  # of its body
        self._counted = 0  # bytes of its body that are taken from the budget
        # The body of either lane
        self._length = 0  # bytes of it, where its head tells them
        self._filled = 0  # and those that have come
        self._idle = 0  # ticks since the last at which more of it had come
        self._seen = -1  # bytes of it at that one
        # The message that uvicorn's parser is within
        self._head_size = 0  # bytes of its head that have come, at least
        self._framing = 0  # bytes of its chunked body beside the content
        self._callbacks = 0  # calls of the parser in this turn
        self._closes = False  # once its body is read
        self._unsent = 0  # bytes of answers at the last tick that the client had not taken
        # Limits per client; the client is None behind a proxy, whose requests are many clients'.
        self._limits: ClientLimits | None = None
        self._peer: Client | None = None

    # What the event loop calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.flow = ReadFlow(transport, self.lane.turns)
        self._closing = self._app.leaving
        self.lane.clock.start()
        if self.client is None or self.lane.clients is None:
            return
        self._limits = self.lane.clients
        if not self._limits.is_proxy(self.client[0]):
            try:
                self._peer = self._limits.connect(self.client[0])
            except TooManyRequests as error:
                self._give_up(error)

    def data_received(self, data: bytes) -> None:
        self._phase.on_data(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.destination.leave(exchange)
            exchange.leave()
        if self._limits is not None and self._peer is not None:
            self._limits.disconnect(self._peer)
            self._peer = None
        self._drop_body()
        self.lane.bytes_in_flight.set_unread(self, 0)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._count_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self.lane.bytes_in_flight.set_unread(self, 0)
        self._unsent = 0
        if self._exchange is not None:
            self._exchange.go_on()
        elif self._phase is ANSWER:
            self._ticks = 0
            self._turn()

    def on_tick(self) -> None:
        """A second has passed (see `connection_clock.py`)."""
        self._ticks += 1
        if self.flow.write_paused or self.transport.is_closing():
            self._check_writing()
        else:
            self._phase.on_tick(self)

    def shutdown(self) -> None:
        """uvicorn's word that the server stops: answer what has begun, then close.

        Where it was replaced, answer one more request first.
        """
        self._closing = True
        if self._exchange is not None:
            self._exchange.close_after()
        elif not self._phase.waits and not (
            self._app.leaving and (self.cycle is None or self.cycle.response_complete)
        ):
            super().shutdown()

    # Reading

    def _begin(self, data: bytes) -> None:
        """`data` begins a request."""
        end = data.find(END) + 4
        if end < 4:
            data = data.lstrip(LINE_END)  # empty lines before a request are nothing (RFC 9112, 2.2)
            if not data:
                self._phase = BETWEEN
                return
            if cannot_be_head(data):
                self._to_uvicorn(data, len(data))
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
            if data[:1] in LINE_END:  # empty lines, as above
                self._begin(data.lstrip(LINE_END))
            elif self._check_head_size(end) and self._check_header_count(
                data.count(b"\n", 0, end) - 2
            ):
                self._to_uvicorn(data, end)
            return
        head, route = known
        have = len(data) - end
        if have == head.length:
            if have <= COPIED:
                self._submit(head, route, data[end:])
            else:
                self._submit_large(head, route, memoryview(data)[end:])
        elif have > head.length:
            self._keep(memoryview(data)[end + head.length :])
            self._submit_large(head, route, data[end : end + head.length])
        elif isinstance(route, RefusalRoute):
            # The other lane answers before the body is there, and throws it away as it comes.
            self._to_uvicorn(data, end)
        else:
            self._head = head
            self._pieces = [memoryview(data)[end:]]
            self._length, self._filled, self._seen, self._idle = head.length, have, -1, 0
            self._set_phase(BODY)
            if self._fits(head, have) and head.waits_for_go:
                self.transport.write(GO_ON)

    def _fill_head(self, data: bytes) -> None:
        self._ahead += data
        self._go_on()

    def _fill_body(self, data: bytes) -> None:
        head, size = self._head, len(data)
        assert head is not None
        missing = head.length - self._filled
        if size > missing:
            self._keep(memoryview(data)[missing:])
            data = data[:missing]
        self._pieces.append(data)
        self._filled += len(data)
        if head.length <= UNCOUNTED or self._fits(head, len(data)):
            if len(self._pieces) > MAX_PIECES:
                self._pieces = [b"".join(self._pieces)]
            if self._filled == head.length:
                self._submit_filled(head)
        if size > LARGE:
            self.flow.yield_turn()

    def _submit_filled(self, head: Head) -> None:
        pieces, self._head, self._pieces = self._pieces, None, []
        body = b"".join(pieces) if head.length <= COPIED else Parts(pieces, head.length)
        assert self.lane.heads is not None
        try:
            route = self.lane.heads.find_again(head)
        except TsxError as error:  # it was unregistered while the body came
            self._give_up(error)
        else:
            self._submit(head, route, body)

    def _submit_large(self, head: Head, route: Route, body: Body) -> None:
        """Submit a request whose body may be large and is there already."""
        self._length = self._filled = head.length
        if self._fits(head, head.length):
            self._submit(head, route, body)

    def _submit(self, head: Head, route: Route, body: Body) -> None:
        if self._limits is not None:
            route = self._limited(self._limits, head, route)
        self._exchange = exchange = self._new_exchange(self, head, body, monotonic())
        if route.client_timeout or head.timeout_ms is not None:
            exchange.deadline = deadline(exchange.arrived, route.client_timeout, head.timeout_ms)
        if head.priority:
            exchange.priority = head.priority
        if head.timing is not None:
            exchange.time(head.timing)
        if self._closing:
            exchange.close_after()
        if self._counted:
            exchange.count(self._counted)
            self._counted = 0
        exchange.destination = route
        self._phase = ANSWER
        route.submit(exchange)

    def _limited(self, limits: ClientLimits, head: Head, route: Route) -> Route:
        """Return where the request goes to: a refusal where its client has sent too many."""
        assert self.client is not None
        client = self._peer
        if client is None:
            client = limits.caller(self.client[0], head.headers)
        try:
            limits.count_request(client)
            if (
                isinstance(route, RefusalRoute)
                and isinstance(route.error, InvalidToken)
                and route.error.given
            ):
                limits.count_failure(client)
        except TooManyRequests as error:
            return RefusalRoute(error, REFUSAL_DELAY_S)
        return route

    # Answering

    @property
    def write_paused(self) -> bool:
        return self.flow.write_paused

    def write(self, data: Buffer) -> None:
        # asyncio would log each further part for a client that has left.
        if not self.transport.is_closing():
            self.transport.write(data)

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

    def abort(self) -> None:
        self._exchange = None
        self.transport.close()

    # What was sent ahead

    def _keep(self, data: bytes | memoryview) -> None:
        """Store it until the request before is answered."""
        self._ahead += data
        self.flow.limit(len(self._ahead))

    def _take_ahead(self, end: int) -> bytes:
        """Take the first bytes of what was kept, or all for -1."""
        ahead = self._ahead
        if not 0 <= end < len(ahead):
            taken, self._ahead = bytes(ahead), bytearray()
        else:
            taken = bytes(memoryview(ahead)[:end])
            del ahead[:end]
        self.flow.limit(len(self._ahead))
        return taken

    def _turn(self) -> None:
        """To the next request."""
        if self._ahead:
            self._phase = HEAD
            # Not at once: answers that are ready would be nested without bound. And in a context of
            # its own, as all turns are: this may be the task of the request before, whose client
            # and span the next one must not have.
            self.lane.turns.call_soon(self._go_on)
        else:
            self._phase = BETWEEN

    def _go_on(self) -> None:
        """Look at what came meanwhile: begin the first request in it, or let uvicorn go on with its
        own.
        """
        if self._has_turn:
            self._has_turn = False
            self._feed_ahead()
            self._take_back()
            return
        if self.transport.is_closing() or self._phase is not HEAD:
            return
        ahead = self._ahead
        if ahead[:1] in LINE_END and (empty := EMPTY_LINES.match(ahead)):
            del ahead[: empty.end()]
        at = ahead.find(END)
        if at >= 0:
            self._begin(self._take_ahead(self._end_of_request(at + len(END))))
        elif not ahead or cannot_be_head(ahead):
            self._begin(self._take_ahead(-1))
        elif self._check_head_size(len(ahead)):
            self.flow.release()

    def _end_of_request(self, end: int) -> int:
        """Return the end of the body of the request whose head ends there, where it is plain, else
        that of its head.
        """
        heads = self.lane.heads
        known = None if heads is None else heads.look_up(bytes(memoryview(self._ahead)[:end]))
        return end if known is None else end + known[0].length

    # uvicorn's own protocol

    def _to_uvicorn(self, data: bytes, end: int) -> None:
        """`data` begins a request, whose head ends there."""
        self._set_phase(UVICORN)
        if end < len(data):
            self._keep(memoryview(data)[end:])
            data = data[:end]
        self._parse(data)
        self._feed_ahead()
        self._take_back()

    def _feed(self, data: bytes) -> None:
        """`data` goes on with the message that the parser is within."""
        if self._has_turn:
            self._keep(data)
        # so no further request is whole in it
        elif len(data) <= self._length - self._filled or (len(data) <= PIECE and END not in data):
            self._parse(data)
        else:
            self._ahead += data
            self._feed_ahead()
        self._take_back()
        if len(data) > LARGE and self._phase.parsing and not self.flow.read_paused:
            self.flow.yield_turn()

    def _feed_ahead(self) -> None:
        self._callbacks = 0
        while self._ahead and self._phase.parsing and not self.transport.is_closing():
            if self._callbacks > CALLBACKS_PER_TURN:
                self._has_turn = self.flow.is_ahead = True
                self.flow.pause_reading()
                self.lane.turns.call_soon(self._go_on)
                return
            self._parse(self._take_ahead(self._end_of_piece()))
        self.flow.limit(len(self._ahead))

    def _end_of_piece(self) -> int:
        """Return up to where the parser may look at what was kept and meet no second request; -1:
        all.
        """
        if self._length > self._filled:
            return self._length - self._filled
        at = self._ahead.find(END, 0 if self._phase is UVICORN_HEAD else SLICE, PIECE)
        return at + len(END) if at >= 0 else PIECE

    def _parse(self, data: bytes) -> None:
        before, filled, message = self._phase, self._filled, self.scope
        super().data_received(data)
        after = self._phase
        if before is UVICORN_HEAD and after is UVICORN_HEAD:
            self._head_size += len(data)
            self._check_head_size(self._head_size)
        elif (
            before.parsing
            and before is not UVICORN_HEAD
            and after.parsing
            and not self._length
            and self.scope is message
        ):  # not another one that began in `data`
            self._framing += len(data) - (self._filled - filled)
            if self._framing - FRAMING_PER_BYTE * self._filled > self.lane.max_head:
                self._give_up(
                    HeadTooLarge(
                        "Sizes, extensions and trailers of the request's chunks have more than"
                        f" {FRAMING_PER_BYTE} bytes for each byte of content and those of"
                        f" max_header_size, which is {self.lane.max_head} bytes. Send larger"
                        " chunks."
                    )
                )

    def _take_back(self) -> None:
        """The connection is between requests again once uvicorn has read and answered all that it
        was given.
        """
        if (
            self._phase is UVICORN
            and not self.pipeline
            and (self.cycle is None or self.cycle.response_complete)
        ):
            self._set_phase(BETWEEN)
            self._turn()

    def close_after_body(self) -> None:
        if self._phase.parsing:
            self._closes = True
        else:
            self.transport.close()

    # What the parser calls

    def on_message_begin(self) -> None:
        self._set_phase(UVICORN_HEAD)
        self._filled = self._length = self._head_size = self._framing = self._idle = 0
        self._seen = -1
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._callbacks += 1
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._length = _plain_length(self.headers)
        super().on_headers_complete()
        self._phase = UVICORN_BODY
        if self.cycle is not None:
            self.cycle.transport = cast("asyncio.Transport", ResponseTransport(self, self.cycle))
            if self._closing:
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._callbacks += 1
        self._filled += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase = UVICORN
        super().on_message_complete()
        if self._closes:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._take_back()
        if self._phase is not UVICORN and not self._phase.parsing:
            self._unset_keepalive_if_required()  # the clock does that

    def _should_upgrade_to_ws(self) -> bool:
        return self.parser.get_method() == b"GET" and self.lane.max_message_size > 0

    def handle_websocket_upgrade(self) -> None:
        # here, because it takes 20 ms, and most servers need none
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
        called = {
            "path": self.config.root_path + unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
        }
        ahead = self._take_ahead(-1)
        self.flow.detach()
        connection.start(self.transport, self.config.loaded_app, {**self.scope, **called})
        if ahead:
            connection.data_received(ahead)

    # Limits of time

    def _check_keep_alive(self) -> None:
        if self._ticks > self.lane.timeouts.keep_alive:
            self.transport.close()

    def _check_head(self) -> None:
        timeout = self.lane.timeouts.head
        if self._ticks > timeout:
            self._give_up(
                SlowRequest(
                    f"The request's headers did not arrive within {timeout} s (header_timeout)."
                )
            )

    def _check_body(self) -> None:
        timeouts, filled = self.lane.timeouts, self._filled
        self._idle = self._idle + 1 if filled == self._seen else 0
        self._seen = filled
        if self._ticks > timeouts.body + filled / timeouts.body_rate:
            self._give_up(
                SlowRequest(
                    f"The request's body came too slowly: {filled} bytes in {self._ticks} s"
                    " (body_timeout)."
                )
            )
        elif self._idle >= timeouts.body_idle:
            text = (
                f"Nothing of the request's body came for {timeouts.body_idle} s"
                f" (body_idle_timeout), after {filled} bytes of it."
            )
            self._give_up(SlowRequest(text))

    def _check_uvicorns_body(self) -> None:
        if self.cycle.response_started:
            self._set_phase(UVICORN_REFUSED)
        elif not self.flow.read_paused:
            self._check_body()

    def _check_refused(self) -> None:
        """What still comes of a body that was answered is thrown away, for a time that does not
        grow with it.
        """
        if self._ticks > self.lane.timeouts.body:
            self.transport.close()

    def _check_nothing(self) -> None:
        """The model or the client takes its time; `_check_writing` sees to the client."""

    def _check_writing(self) -> None:
        size = self.transport.get_write_buffer_size()
        if size < self._unsent or self._unsent == 0:
            self._ticks = 0
        elif self._ticks > self.lane.timeouts.write:
            self.transport.abort()
        self._unsent = size
        self._count_unread(size)

    # Limits of size

    def _count_unread(self, size: int) -> None:
        budget = self.lane.bytes_in_flight
        budget.set_unread(self, size)
        if budget.overdrawn:
            self.loop.call_soon(budget.shed)  # not here, within a write

    def cut_off(self) -> None:
        """The client has too much to read, and the budget is used up."""
        self.transport.abort()

    def _fits(self, head: Head, came: int) -> bool:
        """Take from the budget the `came` bytes of a body that are there.

        Refuse it where they, or at first all of it, do not fit.
        """
        if head.length <= UNCOUNTED:
            return True
        budget = self.lane.bytes_in_flight
        try:
            if not self._counted:
                budget.check(head.length)
            budget.take(came)
        except NoRoom as error:
            self._refuse_body(error, head)
            return False
        self._counted += came
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
        """Answer a request that is not complete, and close."""
        if self.transport.is_closing():
            return
        # uvicorn's cycle is this request's only behind its head, else that of the one before.
        within = self._phase.parsing and self._phase is not UVICORN_HEAD
        if self.cycle is None or (
            not self.cycle.response_started if within else self.cycle.response_complete
        ):
            status, answer = self.lane.response_heads.refusal(
                new_request_id(), error, keep_alive=False
            )
            self.lane.counts.add(status)
            self.transport.write(answer)
        self._drop_body()
        self.transport.close()

    def _refuse_body(self, error: NoRoom, head: Head) -> None:
        """Answer at once.

        A sender whose connection is closed would lose the answer, so the rest of the body is read
        and thrown away.
        """
        lane = self.lane
        error.more = self._filled < head.length
        keep_alive = head.keep_alive and not self._closing
        status, answer = lane.response_heads.refusal(
            new_request_id(), error, error.more or keep_alive, form_of_meta(head.meta)
        )
        lane.counts.add(status)
        self._drop_body()
        if not error.more:
            self._phase = ANSWER
            self.finish(answer, keep_alive)
            return
        self.transport.write(answer)
        if head.waits_for_go and not self._filled:
            self._length = 0  # the client sends no body
        self._set_phase(REFUSED)
        self._throw_away(b"")

    def _throw_away(self, data: bytes) -> None:
        self._filled += len(data)
        if self._filled >= self._length:
            self.transport.close()
        elif len(data) > LARGE:
            self.flow.yield_turn()

    def _drop_body(self) -> None:
        self._head, self._pieces = None, []
        self.lane.bytes_in_flight.give(self._counted)
        self._counted = 0

    def _set_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._ticks = 0


def _plain_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Return the bytes of the body that the parser will read behind these headers; 0 where it is
    chunked, or there is none.
    """
    length = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return 0
        if name == b"content-length" and value.isdigit():
            length = int(value)
    return length


# Nothing is under way: the next bytes begin a request.
BETWEEN = Phase(FastLane._begin, FastLane._check_keep_alive)
# Part of a head is there.
HEAD = Phase(FastLane._fill_head, FastLane._check_head)
# The head of a plain request is there, part of its body is missing.
BODY = Phase(FastLane._fill_body, FastLane._check_body, waits=True)
# A plain request is with the model, or its answer is not taken yet.
ANSWER = Phase(FastLane._keep, FastLane._check_nothing)
# A request was refused before its whole body came; the rest is thrown away.
REFUSED = Phase(FastLane._throw_away, FastLane._check_refused, waits=True)
# uvicorn's protocol has the connection. It reads a head, a body, the rest of a body that it has
# answered already; or it has read all that it was given, and answers it.
UVICORN_HEAD = Phase(FastLane._feed, FastLane._check_head, parsing=True)
UVICORN_BODY = Phase(FastLane._feed, FastLane._check_uvicorns_body, parsing=True)
UVICORN_REFUSED = Phase(FastLane._feed, FastLane._check_refused, parsing=True)
UVICORN = Phase(FastLane._keep, FastLane._check_nothing)
