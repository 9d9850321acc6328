"""uvicorn's HTTP/1.1 protocol, given one request at a time.

uvicorn's own parses all that has come at once, and queues a task's worth of objects for each
request in it without a bound. Here its parser gets the bytes up to the end of one request, as far
as that can be seen, and what follows waits as bytes until that request is read and answered. A
client that sends further ahead than `AHEAD` is not read from until half of that is left.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.flow_control import FlowControl

from tsx_runtime.http.fast_lane.cased_protocol import CasedProtocol
from tsx_runtime.http.turns import Turns

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

END = b"\r\n\r\n"  # of each head, and of each chunked body
AHEAD = (
    64 << 10
    # bytes that a client may send ahead of the request that it waits for before it is no longer
    # read from
)
LOW = AHEAD // 2  # bytes left at which it is read from again
# bytes of a body that the parser gets at once at least: so few requests may begin behind it in the
# same piece
SLICE = 512
PIECE = 4096  # bytes of a head or a chunked body that the parser gets at once at most
FRAMING_PER_BYTE = (
    8  # bytes of sizes, extensions and trailers that chunks may have for each byte of their content
)
CALLBACKS_PER_TURN = 256  # headers and chunks before other connections have their turn


class ReadFlow(FlowControl):
    """Reading pauses where uvicorn asks for it, for a body that its route has not taken yet, and
    where too much was sent ahead.

    It is resumed in one of the next turns of the event loop, of which each resumes a few
    connections.
    """

    def __init__(self, transport: asyncio.Transport, turns: Turns) -> None:
        super().__init__(transport)
        self.is_ahead = False
        self._read_from = transport
        self._turns = turns
        self._resumes = False  # soon

    def pause_reading(self) -> None:
        self._resumes = False
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self.is_ahead and not self._resumes:
            self._resumes = True
            self._turns.call_soon(self._resume)

    def _resume(self) -> None:
        if self._resumes and not self._read_from.is_closing():
            self._resumes = False
            super().resume_reading()

    def yield_turn(self) -> None:
        """Read on in another turn: the event loop would read megabytes from one connection in this
        one.
        """
        if not self._read_from.is_closing():
            self.pause_reading()
            self.resume_reading()

    def limit(self, ahead: int) -> None:
        """`ahead` bytes are waiting."""
        if ahead > AHEAD:
            self.is_ahead = True
            self.pause_reading()
        elif self.is_ahead and ahead <= LOW:
            self.release()

    def release(self) -> None:
        """Read again: what waits is an incomplete request."""
        self.is_ahead = False
        self.resume_reading()

    def detach(self) -> None:
        """Read now, and never resume later: from here on another protocol pauses the transport."""
        self.is_ahead = self._resumes = False
        super().resume_reading()


class ResponseTransport:
    """What uvicorn's cycle writes to.

    It closes once the body is read: before, the client could lose the answer (RFC 9112, 9.6).
    """

    def __init__(self, connection: PipeliningProtocol, cycle: RequestResponseCycle) -> None:
        self._connection, self._cycle = connection, cycle
        self.is_closing = connection.transport.is_closing

    def write(self, data: bytes) -> None:
        if (
            not self.is_closing()
        ):  # of a connection that what came behind the request has ended, uvloop would raise
            self._connection.transport.write(data)

    def close(self) -> None:
        if self._cycle.response_complete:
            self._connection.close_after_body()
        else:  # the client sees by the early end that the answer is incomplete
            self._connection.transport.close()


class PipeliningProtocol(CasedProtocol):
    """`_feed` what comes while a request is read, `_keep` what comes before it is answered."""

    flow: ReadFlow
    turns: Turns  # of the listener

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # what is not looked at yet. (CPython deletes from the front of a bytearray without moving
        # the rest.)
        self._ahead = bytearray()
        self._reading = False  # uvicorn's parser is within a message
        self._head_size = 0  # bytes of the present head that have come, at least
        self._length = 0  # bytes of the present body, where the head has the length
        self._filled = 0  # and those that have come
        self._closes = False  # once the present body is read
        self._callbacks = 0  # calls of the parser in this turn
        self._has_turn = False  # a turn is scheduled, in which the bytes ahead are parsed
        self._framing = 0  # bytes of a chunked body beside its content: sizes, extensions, trailers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.flow = ReadFlow(transport, self.turns)

    def close_after_body(self) -> None:
        if self._reading:
            self._closes = True
        else:
            self.transport.close()

    def _keep(self, data: bytes | memoryview) -> None:
        """Store it until the request before is answered."""
        self._ahead += data
        self.flow.limit(len(self._ahead))

    def _take_ahead(self, end: int) -> bytes:
        """The first bytes of what was kept, or all for -1."""
        ahead = self._ahead
        if not 0 <= end < len(ahead):
            taken, self._ahead = bytes(ahead), bytearray()
        else:
            taken = bytes(memoryview(ahead)[:end])
            del ahead[:end]
        self.flow.limit(len(self._ahead))
        return taken

    def _feed(self, data: bytes) -> None:
        """`data` goes on with the message that the parser is within."""
        if self._has_turn:
            self._keep(data)
        elif len(data) <= self._length - self._filled or (
            len(data) <= PIECE and END not in data
        ):  # so no further request is whole in it
            self._parse(data)
        else:
            self._ahead += data
            self._feed_ahead()

    def _feed_ahead(self) -> None:
        self._callbacks = 0
        while self._ahead and self._reading and not self.transport.is_closing():
            if self._callbacks > CALLBACKS_PER_TURN:
                self._has_turn = self.flow.is_ahead = True
                self.flow.pause_reading()
                self.turns.call_soon(self._go_on)
                return
            self._parse(self._take_ahead(self._end_of_piece()))
        self.flow.limit(len(self._ahead))

    def _go_on(self) -> None:
        """Look at the bytes ahead, in a turn of this connection."""
        raise NotImplementedError

    def _end_of_piece(self) -> int:
        """Up to where the parser may look at what was kept and meet no second request; -1: all."""
        if self._length > self._filled:
            return self._length - self._filled
        at = self._ahead.find(END, 0 if self._in_head else SLICE, PIECE)
        return at + len(END) if at >= 0 else PIECE

    def _parse(self, data: bytes) -> None:
        in_head, in_body, filled, message = (
            self._in_head,
            self._reading and not self._in_head,
            self._filled,
            self.scope,
        )
        CasedProtocol.data_received(self, data)
        if in_head and self._in_head:
            self._head_size += len(data)
            self._check_head_size(self._head_size)
        elif (
            in_body and self._reading and not self._length and self.scope is message
        ):  # not another one that began in `data`
            self._framing += len(data) - (self._filled - filled)
            self._check_framing(self._framing - FRAMING_PER_BYTE * self._filled)

    def _check_head_size(self, size: int) -> bool:
        raise NotImplementedError

    def _check_framing(self, size: int) -> None:
        """Refuse a chunked body whose framing exceeds its content by too many bytes, `size`."""
        raise NotImplementedError

    # What the parser calls

    def on_message_begin(self) -> None:
        self._reading = True
        self._filled = self._length = self._head_size = self._framing = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._callbacks += 1
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._length = _plain_length(self.headers)
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = cast("asyncio.Transport", ResponseTransport(self, self.cycle))

    def on_body(self, body: bytes) -> None:
        self._callbacks += 1
        self._filled += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reading = False
        super().on_message_complete()
        if self._closes:
            self.transport.close()


def _plain_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Bytes of the body that the parser will read behind these headers; 0 where it is chunked, or
    there is none.
    """
    length = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return 0
        if name == b"content-length" and value.isdigit():
            length = int(value)
    return length
