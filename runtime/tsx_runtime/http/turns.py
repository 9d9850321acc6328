"""Spreads the work of many connections over turns of the event loop, so that no turn takes long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from itertools import islice

LARGE = 64 << 10  # bytes of one read after which the other connections have their turn
MOST = 2  # a turn: a request that was sent ahead, or a read of up to 256 KB each


class Turns:
    """Runs callbacks in the order in which they came, at most `MOST` in one turn of the loop, each
    in a context of its own.
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
        for callback in list(islice(waiting, MOST)):
            self._loop.call_soon(callback, context=Context())
            waiting.popleft()
        if waiting:
            self._loop.call_soon(self._run)
