"""What the server and a relay tell each other, over one socket pair.

A frame of `wire` (its kind is `RELAY`) has what one turn of the event loop brought, an item each: the code says what it is, meta is the
number of the connection or of the listener (`NUMBER`), the body belongs to it.
What comes for a connection that has ended meanwhile is ignored. The relay ends when the pair does; the server takes the end
of the pair for the relay's death.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from typing import TypedDict, cast

from tsx_runtime import wire

NUMBER = struct.Struct("<Q")
FRAME = 1 << 20  # bytes after which a frame is sent before the turn ends: large bodies pass on as they come
UNSENT = 4 << 20  # bytes that may wait to be sent over the pair before what they come from is held


class RelayItem(enum.IntEnum):
    # From the relay, of a connection
    OPEN = 1  # the handshake is done: [number of the listener, the client's address, the server's], JSON
    DATA = 2  # what the client sent
    LOST = 3  # it has ended, whatever ended it
    UNREAD = 4  # bytes of its answers that the client has yet to take, as text: each second while they are too many, or it closes; then 0
    # From the server, of a connection
    WRITE = 5  # bytes for the client
    CLOSE = 6  # close it once the client has taken everything
    ABORT = 7  # close it at once
    HOLD = 8  # read nothing more from the client
    RELEASE = 9  # read on
    # Of the relay and its listeners
    ORDERS = 10  # from the server, the first item of all: `RelayOrders`, JSON
    READY = 11  # from the relay: it accepts connections
    STOP = 12  # from the server: accept no more connections of this listener
    STOPPED = 13  # from the relay: it accepts none there


class RelayOrders(TypedDict):
    """All that a relay needs."""

    listeners: dict[str, int]  # descriptors of listening sockets that it has inherited, by number
    backlog: int
    handshake_timeout: int
    certificates: str
    key: str  # of the certificate: the only secret that it has


class FrameLink(asyncio.Protocol):
    """One end of the socket pair: collects what is to be sent in a turn of the loop, and calls `on_item` for what arrives."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._codes: list[int] = []
        self._fields: list[wire.Body] = []
        self._size = 0  # bytes of the bodies in them
        self._pieces: list[bytes] = []  # of a frame that is not complete
        self._missing = 0  # bytes of it, as far as known

    def on_item(self, code: int, number: int, body: wire.Buffer) -> None:
        raise NotImplementedError

    def send(self, code: int, number: int, body: wire.Buffer = b"") -> None:
        """`body` must not change any more."""
        if not self._codes:
            self._loop.call_soon(self._flush)
        self._codes.append(code)
        self._fields += (NUMBER.pack(number), body)
        self._size += len(body)
        if self._size >= FRAME or len(self._codes) == wire.MAX_ITEMS:
            self._flush()

    def _flush(self) -> None:
        codes, fields = self._codes, self._fields
        self._codes, self._fields, self._size = [], [], 0
        if not codes or self.transport.is_closing():
            return
        buffers = wire.encode_fields(wire.Kind.RELAY, 0, codes, fields)
        if sum(map(len, buffers)) <= wire.COPIED:
            self.transport.write(b"".join(buffers))
        else:
            self.transport.writelines(buffers)

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(UNSENT)

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        view, start, size = memoryview(data), 0, len(data)
        self._pieces, self._missing = [], 0
        while size - start >= wire.HEADER.size:
            header = wire.decode_header(view[start : start + wire.HEADER.size])
            begin = start + wire.HEADER.size
            end = begin + header.size
            if end > size:
                self._missing = end - size
                break
            for code, meta, body in wire.decode(header, view[begin:end]).items:
                self.on_item(code, NUMBER.unpack(meta)[0], body)
            start = end
        if start < size:
            self._pieces.append(data[start:])
