"""A client's connection that a relay has, as the transport of its protocol in the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextvars import Context
from typing import Any, Protocol

from tsx_runtime.targets.frontends.frames import FRAME, RelayItem

HELD = 64 << 10  # bytes that wait for a protocol that does not read before its client is no longer read from

logger = logging.getLogger("tsx.server")


class Relaying(Protocol):
    """What a connection needs of the link to its relay."""

    connections: dict[int, RelayedTransport]
    transport: asyncio.Transport
    is_full: bool

    def send(self, code: int, number: int, body: Any = b"") -> None: ...


class RelayedTransport(asyncio.Transport):
    def __init__(self, link: Relaying, number: int, extra: dict[str, Any]) -> None:
        super().__init__(extra)
        self._link = link
        self._number = number
        self._protocol: Any = None
        self._context = Context()  # of its own, as each connection's is that the event loop has
        self._is_closing = False
        self._unread = 0  # bytes of answers that the relay has, where they are many
        self._is_client_full = False
        self._is_full = False  # so the protocol was told
        self._is_paused = False
        self._is_held = False  # so the relay was told
        self._waiting: list[bytes] = []  # what came while the protocol did not read
        self._waiting_size = 0

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
        self._waiting.append(data)
        self._waiting_size += len(data)
        if self._is_paused and not self._is_held and self._waiting_size > HELD:
            self._is_held = True
            self._link.send(RelayItem.HOLD, self._number)

    def tell_unread(self, size: int, *, is_full: bool) -> None:
        self._unread = size
        self._is_client_full = is_full
        self.update_flow()

    def update_flow(self) -> None:
        is_full = self._is_client_full or self._link.is_full
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
        else:
            view = memoryview(data)
            for start in range(0, len(view), FRAME):
                self._link.send(RelayItem.WRITE, self._number, view[start : start + FRAME])

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

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

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def _catch_up(self) -> None:
        waiting, self._waiting, self._waiting_size = self._waiting, [], 0
        for place, data in enumerate(waiting):
            if self._is_closing:
                return
            if self._is_paused:
                self._waiting = [*waiting[place:], *self._waiting]
                self._waiting_size = sum(map(len, self._waiting))
                return
            self._call(self._protocol.data_received, data)
