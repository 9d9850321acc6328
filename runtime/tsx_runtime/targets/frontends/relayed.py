"""The clients' connections that a relay has, as the server sees them: a transport each, under the same protocol as without relays."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
from collections.abc import Callable
from contextvars import Context
from typing import Any

from tsx_runtime import wire
from tsx_runtime.targets.frontends.frames import FRAME, FrameLink, RelayItem

HELD = 64 << 10  # bytes that wait for a protocol that does not read before its client is no longer read from

logger = logging.getLogger("tsx.server")

NewProtocol = Callable[[], asyncio.Protocol]


class RelayLink(FrameLink):
    """The server's end of a relay's socket pair."""

    def __init__(self, served: dict[int, NewProtocol], process: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self.process = process
        self.connections: dict[int, RelayedTransport] = {}
        self.is_full = False  # more waits to be sent over the pair than may
        self.ready: asyncio.Future[bool] = self._loop.create_future()
        self.ended = asyncio.Event()
        self._served = served
        self._stopped: dict[int, asyncio.Future[None]] = {}

    def on_item(self, code: int, number: int, body: wire.Buffer) -> None:
        if code == RelayItem.OPEN:
            self._open(number, *json.loads(bytes(body)))
        elif code == RelayItem.STOPPED:
            self._stopped[number].set_result(None)
        elif code == RelayItem.READY:
            self.ready.set_result(True)
        elif (connection := self.connections.get(number)) is None:  # it was aborted
            pass
        elif code == RelayItem.DATA:
            connection.received(body if type(body) is bytes else bytes(body))
        elif code == RelayItem.LOST:
            connection.lost(None)
        elif code == RelayItem.UNREAD:
            connection.tell_unread(int(bytes(body)))

    def _open(self, number: int, listener: int, client: list[Any] | None, server: list[Any] | None) -> None:
        # Of an IPv6 address host and port alone: uvicorn takes no others.
        extra = {"peername": client and tuple(client[:2]), "sockname": server and tuple(server[:2]), "sslcontext": True}
        self.connections[number] = connection = RelayedTransport(self, number, extra)
        connection.begin(self._served[listener]())

    def stop(self, listener: int) -> asyncio.Future[None]:
        """Done once the relay accepts no more connections of the listener."""
        self._stopped[listener] = stopped = self._loop.create_future()
        if self.ended.is_set():
            stopped.set_result(None)
        self.send(RelayItem.STOP, listener)
        return stopped

    def pause_writing(self) -> None:
        self._set_full(True)

    def resume_writing(self) -> None:
        self._set_full(False)

    def _set_full(self, is_full: bool) -> None:
        self.is_full = is_full
        for connection in list(self.connections.values()):
            connection.update_flow()

    def connection_lost(self, exc: Exception | None) -> None:
        for connection in list(self.connections.values()):
            connection.lost(ConnectionResetError("the relay of this connection has ended"))
        if not self.ready.done():
            self.ready.set_result(False)
        for stopped in self._stopped.values():
            if not stopped.done():
                stopped.set_result(None)
        self.ended.set()


class RelayedTransport(asyncio.Transport):
    def __init__(self, link: RelayLink, number: int, extra: dict[str, Any]) -> None:
        super().__init__(extra)
        self._link = link
        self._number = number
        self._protocol: Any = None
        self._context = Context()  # of its own, as each connection of the event loop has one
        self._is_closing = False
        self._unread = 0  # bytes of answers that the relay has, where they are many
        self._is_full = False  # so the protocol was told
        self._is_paused = False
        self._is_held = False  # so the relay was told
        self._waiting = bytearray()  # what came while the protocol did not read

    # What the relay tells

    def begin(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        self._call(protocol.connection_made, self)
        self.update_flow()

    def received(self, data: bytes) -> None:
        if self._is_closing:
            return
        if not self._is_paused and not self._waiting:
            self._call(self._protocol.data_received, data)
            return
        self._waiting += data
        if self._is_paused and not self._is_held and len(self._waiting) > HELD:
            self._is_held = True
            self._link.send(RelayItem.HOLD, self._number)

    def tell_unread(self, size: int) -> None:
        self._unread = size
        self.update_flow()

    def update_flow(self) -> None:
        is_full = self._unread > 0 or self._link.is_full
        if is_full != self._is_full:
            self._is_full = is_full
            (self._protocol.pause_writing if is_full else self._protocol.resume_writing)()

    def lost(self, error: Exception | None) -> None:
        self._is_closing = True
        if self._link.connections.pop(self._number, None) is not None:
            self._call(self._protocol.connection_lost, error)

    def _call(self, method: Callable[..., object], argument: object) -> None:
        try:
            self._context.run(method, argument)
        except Exception:  # the boundary of a connection: the others of the frame go on
            logger.exception("a connection failed, so it is closed")
            self.abort()

    # The transport of the protocol

    def write(self, data: Any) -> None:
        if self._is_closing or not data:
            return
        if type(data) is bytearray:  # the only kind that may change
            data = bytes(data)
        if len(data) <= FRAME:
            self._link.send(RelayItem.WRITE, self._number, data)
            return
        view = memoryview(data)
        for start in range(0, len(view), FRAME):
            self._link.send(RelayItem.WRITE, self._number, view[start : start + FRAME])

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._link.send(RelayItem.CLOSE, self._number)

    def abort(self) -> None:
        """Whether the relay answers or not."""
        if self._number in self._link.connections:
            self._is_closing = True
            self._link.send(RelayItem.ABORT, self._number)
            asyncio.get_running_loop().call_soon(self.lost, None)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return self._unread + (self._link.transport.get_write_buffer_size() if self._link.is_full else 0)

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        if self._is_held:
            self._is_held = False
            self._link.send(RelayItem.RELEASE, self._number)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._catch_up)

    def _catch_up(self) -> None:
        if self._waiting and not self._is_paused and not self._is_closing:
            waiting, self._waiting = bytes(self._waiting), bytearray()
            self._call(self._protocol.data_received, waiting)
