"""One limit for the bytes of all bodies that a server holds: arriving, waiting or running requests,
and unread answers.

Bodies of up to `UNCOUNTED` bytes, and as much of any answer, are left out over HTTP: there is at
most one a connection, and so a small request costs nothing here and still passes where large ones
are refused.

    bodies     at most 7/8 of the limit: what comes beyond is refused
    answers    at most 1/2 of the limit, and all together at most the limit: beyond it the clients that have the most to read are cut off

So neither clients that do not read nor bodies that do not end can take everything from the others.
Once most of what was held is given back, the memory is returned to the system.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from tsx_runtime.errors import NoRoom
from tsx_runtime.heap import return_freed_memory

UNCOUNTED = 64 << 10  # bytes
LARGE = 32 << 20  # bytes that were held at once, from which on memory is returned
RETURN_AFTER = 5.0  # seconds: the next bodies may need it again


class Reader(Protocol):
    """The client of an answer."""

    def cut_off(self) -> None:
        """Throw away what it has not read; `set_unread` follows with 0, now or later."""


class ByteBudget:
    """Counts bytes against `max_inflight_bytes`.

    What is taken must be given back once, whatever happens to the request.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.refused = 0  # requests, for /metrics
        self.unread = 0  # of `used`: bytes of answers
        self.cut_off = 0  # clients, for /metrics
        self._readers: dict[Reader, int] = {}
        self._most = 0  # bytes held at once since memory was returned
        self._returning: asyncio.TimerHandle | None = None

    def check(self, size: int) -> None:
        """Raises NoRoom where a body of that many bytes does not fit now."""
        if self.used + size > self.limit - self.limit // 8:
            self.refused += 1
            raise NoRoom(
                f"The server holds {self.used} bytes of requests and answers, and {size} more do"
                f" not fit into max_inflight_bytes, which is {self.limit} (an eighth is kept for"
                " answers). Try again later, or send smaller bodies.",
                retry_after=1,
            )

    def take(self, size: int) -> None:
        """Raises NoRoom, which is an Unavailable, where that many more bytes do not fit; nothing is
        taken then.
        """
        self.check(size)
        self._change(size)

    def give(self, size: int) -> None:
        self._change(-size)

    def set_unread(self, reader: Reader, size: int) -> None:
        """`size` bytes of answers wait for this client now."""
        more = size - self._readers.pop(reader, 0)
        if size:
            self._readers[reader] = size
        self.unread += more
        self._change(more)

    def _change(self, size: int) -> None:
        self.used += size
        if self.used > self._most:
            self._most = self.used
        elif self._most >= LARGE and self.used < self._most // 4 and self._returning is None:
            with suppress(RuntimeError):  # no loop runs
                self._returning = asyncio.get_running_loop().call_later(
                    RETURN_AFTER, self._return_memory
                )

    def _return_memory(self) -> None:
        self._returning, self._most = None, self.used
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)

    @property
    def overdrawn(self) -> bool:
        """Whether `shed` has something to do."""
        return bool(self._readers) and (self.used > self.limit or self.unread > self.limit // 2)

    def shed(self) -> None:
        """Cut clients off, those with the most to read first, until what is left fits."""
        while self.overdrawn:
            reader = max(self._readers, key=self._readers.__getitem__)
            self.cut_off += 1
            self.set_unread(reader, 0)
            reader.cut_off()
