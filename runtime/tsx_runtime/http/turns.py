"""The queue that spreads the work of many connections over short turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from itertools import islice

# A connection that has read more bytes at once lets the others have their turn.
LARGE_READ_BYTES = 64 << 10
# Each callback begins a request that was sent ahead, or reads up to 256 KB.
MAX_CALLBACKS_PER_TURN = 2


class Turns:
    """A queue of callbacks; one turn of the loop runs at most `MAX_CALLBACKS_PER_TURN` of them.

    They run in order, and each runs in a new context.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._waiting.append(callback)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        waiting = self._waiting
        for callback in list(islice(waiting, MAX_CALLBACKS_PER_TURN)):
            self._loop.call_soon(callback, context=Context())
            waiting.popleft()
        if waiting:
            self._loop.call_soon(self._run)
