"""Transports without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

READ_BYTES = 256 << 10  # the largest read of the event loop


class FakeTransport(asyncio.Transport):
    """A transport that records written data and delivers `data` on request."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__()
        self.data = data
        self.sent = 0
        self.written = bytearray()
        self.unread = 0  # bytes that the client has not read yet
        self.pauses: list[bool] = []  # True for each pause, False for each resumption
        self.closed = asyncio.Event()
        self.aborted = False
        self.protocol: Any = None  # the protocol that has taken over

    @property
    def paused(self) -> bool:
        return self.pauses[-1:] == [True]

    def deliver(self, connection: Any) -> bool:
        """Deliver one read, unless reading is paused; return whether there was one."""
        if self.paused or self.is_closing() or self.sent == len(self.data):
            return False
        piece = self.data[self.sent : self.sent + READ_BYTES]
        self.sent += len(piece)
        connection.data_received(piece)
        return True

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        self.pauses.append(True)

    def resume_reading(self) -> None:
        self.pauses.append(False)

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()

    def abort(self) -> None:
        self.aborted = True
