"""The queue that spreads many connections' work over several iterations of the event loop.

One iteration is called a turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from itertools import islice

# A connection that has read more bytes at once lets the other connections run first.
LARGE_READ_BYTES = 64 << 10
# A callback begins a request that its client has sent ahead, or reads up to 256 KB.
MAX_CALLBACKS_PER_TURN = 2


class Turns:
    """A queue of callbacks; one turn of the loop runs at most `MAX_CALLBACKS_PER_TURN` of them.

    They run in order, and each runs in a new context.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._callbacks: deque[Callable[[], None]] = deque()

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        if len(self._callbacks) == 1:
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        callbacks = self._callbacks
        for callback in list(islice(callbacks, MAX_CALLBACKS_PER_TURN)):
            self._loop.call_soon(callback, context=Context())
            callbacks.popleft()
        if callbacks:
            self._loop.call_soon(self._run)
