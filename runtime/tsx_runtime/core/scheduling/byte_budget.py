"""The limit for the bytes of all bodies in a server: requests in any state, and unread answers.

Over HTTP, bodies of up to `MAX_UNCOUNTED_BYTES` are not counted, nor are the first such bytes of an
answer; each connection has at most one of both. A small request therefore needs nothing from the
limit, and passes while large ones are refused.

    bodies     at most 7/8 of the limit; further ones are refused
    answers    at most 1/2 of the limit, and at most the limit together with bodies; beyond it the
               clients with the most unread bytes are cut off

Thus neither clients that do not read nor bodies that do not end can use up the limit. After most of
the bytes are given back, the process returns freed memory to the system.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from tsx_runtime.errors import NoRoom
from tsx_runtime.heap import return_freed_memory

MAX_UNCOUNTED_BYTES = 64 << 10
MIN_RETURNED_BYTES = 32 << 20  # memory is returned after peaks of this size
RETURN_DELAY_S = 5.0  # Before that, the next bodies may use the memory again.


class Reader(Protocol):
    """The client of an answer."""

    def cut_off(self) -> None:
        """Discard its unread bytes; it calls `set_unread` with 0, now or later."""


class ByteBudget:
    """Counts bytes against `max_inflight_bytes`.

    Bytes that were taken must be given back exactly once, whatever happens to the request.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.refused = 0  # number of refused requests, for /metrics
        self.unread = 0  # the bytes of `used` that are in answers
        self.cut_off = 0  # number of clients that were cut off, for /metrics
        self._readers: dict[Reader, int] = {}
        self._peak = 0  # largest `used` since memory was returned
        self._return_timer: asyncio.TimerHandle | None = None

    def check(self, size: int) -> None:
        """Check that `size` bytes of a body fit now.

        Raises:
            NoRoom: They do not fit.
        """
        if self.used + size > self.limit - self.limit // 8:
            self.refused += 1
            raise NoRoom(
                f"The server holds {self.used} bytes of requests and answers, and {size} more do"
                f" not fit into max_inflight_bytes, which is {self.limit} (an eighth is kept for"
                " answers). Try again later, or send smaller bodies.",
                retry_after=1,
            )

    def take(self, size: int) -> None:
        """Take `size` bytes.

        Raises:
            NoRoom: They do not fit, and nothing is taken.
        """
        self.check(size)
        self._change(size)

    def give(self, size: int) -> None:
        self._change(-size)

    def set_unread(self, reader: Reader, size: int) -> None:
        """Set the bytes of answers that wait for this client."""
        increase = size - self._readers.pop(reader, 0)
        if size:
            self._readers[reader] = size
        self.unread += increase
        self._change(increase)

    def _change(self, size: int) -> None:
        self.used += size
        if self.used > self._peak:
            self._peak = self.used
        elif (
            self._peak >= MIN_RETURNED_BYTES
            and self.used < self._peak // 4
            and self._return_timer is None
        ):
            with suppress(RuntimeError):  # There is no running event loop.
                self._return_timer = asyncio.get_running_loop().call_later(
                    RETURN_DELAY_S, self._return_memory
                )

    def _return_memory(self) -> None:
        self._return_timer, self._peak = None, self.used
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)

    @property
    def overdrawn(self) -> bool:
        """Whether `shed` has to cut off clients."""
        return bool(self._readers) and (self.used > self.limit or self.unread > self.limit // 2)

    def shed(self) -> None:
        """Cut off clients, those with the most unread bytes first, until the rest fits."""
        while self.overdrawn:
            reader = max(self._readers, key=self._readers.__getitem__)
            self.cut_off += 1
            self.set_unread(reader, 0)
            reader.cut_off()
