"""The fast lane: passes requests from a connection's bytes directly to a model's queue, and answers
directly to the connection.

A uvicorn protocol class. Requests that run a model and are plain (HTTP/1.1, a body with a
Content-Length) never meet the parser callbacks, scopes, tasks and events of an ASGI server: their
head is looked up or read once (`heads.py`), their body is cut from the stream by its length, and a
job goes to the model's queue. Everything else, and everything that is wrong, is handed byte for
byte to uvicorn's own protocol and so to FastAPI, which has the same routes; errors are defined in
one place, and both lanes answer alike. (Chunked bodies, HEAD, OPTIONS, HTTP/1.0, a body over the
limit, a missing token and an unknown model go there.)

The phases of a connection are those of `connection_limits.py`. What a client sends ahead waits
within a bound (`pipelining.py`), and one turn of the event loop begins one of the requests in it at
most; a few connections have such a turn at once (`turns.py`).
"""

from __future__ import annotations

import asyncio
import re
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tsx_runtime.api.messages import MOST_PIECES
from tsx_runtime.api.request_options import deadline
from tsx_runtime.core.scheduling.byte_budget import UNCOUNTED
from tsx_runtime.errors import BadRequest, TsxError
from tsx_runtime.http.fast_lane.connection_limits import (
    ANSWER,
    BETWEEN,
    BODY,
    HEAD,
    REFUSED,
    UVICORN,
    LimitedConnection,
)
from tsx_runtime.http.fast_lane.exchange import Exchange
from tsx_runtime.http.fast_lane.heads import Head, RefusalRoute, cannot_be_head
from tsx_runtime.http.fast_lane.observed_exchange import new_exchange_of
from tsx_runtime.http.fast_lane.pipelining import END
from tsx_runtime.http.turns import LARGE
from tsx_runtime.wire import COPIED, Body, Buffer, Parts

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from tsx_runtime.core.scheduling.job import Route

GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
LINE_END = b"\r\n"
EMPTY_LINES = re.compile(rb"[\r\n]*")


class FastLane(LimitedConnection):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._exchange: Exchange | None = None
        self._new_exchange = new_exchange_of(self.lane)

    # What the event loop calls

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase is BETWEEN:
            if self.timeout_keep_alive_task is not None:
                self._unset_keepalive_if_required()
            self._begin(data)
        elif phase is BODY:
            self._fill(data)
            if len(data) > LARGE:
                self.flow.yield_turn()
        elif phase is UVICORN and self._reading:
            self._feed(data)
            self._take_back()
            if len(data) > LARGE and self._reading and not self.flow.read_paused:
                self.flow.yield_turn()
        elif phase is HEAD:
            self._ahead += data
            self._go_on()
        elif phase is REFUSED:
            self._throw_away(len(data))
        else:
            self._keep(data)

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.destination.leave(exchange)
            exchange.leave()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._exchange is not None:
            self._exchange.go_on()
        elif self._phase is ANSWER:
            self._ticks = 0
            self._turn()

    def shutdown(self) -> None:
        """uvicorn's word that the server stops: answer what has begun, then close.

        Where it was replaced, answer one more request first.
        """
        self._closing = True
        if self._exchange is not None:
            self._exchange.close_after()
        elif self._phase not in (BODY, REFUSED) and not (
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
            self._to_uvicorn(
                data, end
            )  # the other lane answers before the body is there, and throws it away as it comes
        else:
            self._head = head
            self._pieces = [memoryview(data)[end:]]
            self._filled, self._seen, self._idle = have, -1, 0
            self._set_phase(BODY)
            if self._fits(head, have) and head.waits_for_go:
                self.transport.write(GO_ON)

    def _submit_large(self, head: Head, route: Route, body: Body) -> None:
        """Submit a request whose body may be large and is there already."""
        self._filled = head.length
        if self._fits(head, head.length):
            self._submit(head, route, body)

    def _fill(self, data: bytes) -> None:
        head = self._head
        assert head is not None
        missing = head.length - self._filled
        if len(data) > missing:
            self._keep(memoryview(data)[missing:])
            data = data[:missing]
        self._pieces.append(data)
        self._filled += len(data)
        if head.length > UNCOUNTED and not self._fits(head, len(data)):
            return
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

    # Answering

    @property
    def write_paused(self) -> bool:
        return self.flow.write_paused

    def write(self, data: Buffer) -> None:
        if (
            not self.transport.is_closing()
        ):  # of a client that has left, asyncio would log each further part
            self.transport.write(data)

    def finish(self, last: Buffer, keep_alive: bool) -> None:
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
            # Not at once: answers that are ready would be nested without bound. And in a context of
            # its own, as all turns are: this may be the task of the request before, whose client
            # and span the next one must not have.
            self.turns.call_soon(self._go_on)
        else:
            self._phase = BETWEEN

    def abort(self) -> None:
        self._exchange = None
        self.transport.close()

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
        """Of the one whose head ends there: the end of its body, where it is plain, else of its
        head.
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

    def _take_back(self) -> None:
        """The connection is between requests again once uvicorn has read and answered all that it
        was given.
        """
        if (
            self._phase is UVICORN
            and not self._reading
            and not self.pipeline
            and (self.cycle is None or self.cycle.response_complete)
        ):
            self._set_phase(BETWEEN)
            self._turn()

    def _should_upgrade_to_ws(self) -> bool:
        return self.parser.get_method() == b"GET" and self.lane.max_message_size > 0

    def handle_websocket_upgrade(self) -> None:
        from tsx_runtime.http.websocket import (
            WebSocketConnection,
        )  # here, because it takes 20 ms, and most servers need none

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

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._closing and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._take_back()
        if self._phase is not UVICORN:
            self._unset_keepalive_if_required()  # the clock does that
