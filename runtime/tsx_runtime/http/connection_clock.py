"""The timeouts of connections, checked once a second: a timer for each request would cost more than
its parsing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import NamedTuple, Protocol

TICK = 1.0  # seconds


class Timeouts(NamedTuple):
    """In seconds."""

    keep_alive: int  # between two requests, and before the first
    head: int  # from a request's first byte to the end of its headers
    body: int  # for a body, and on top what its bytes take at `body_rate`
    body_idle: int  # between two reads of a body
    write: int  # for a client that takes nothing of its answer
    body_rate: int = 16 << 10  # bytes a second


class TimedConnection(Protocol):
    def on_tick(self) -> None:
        """Another second has passed."""


class Clock:
    """Ticks for the connections of one server while there are any."""

    def __init__(self, connections: Collection[TimedConnection]) -> None:
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for connection in list(self._connections):
            connection.on_tick()
        if self._connections:
            self.start()
