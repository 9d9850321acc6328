"""The timeouts of connections, and the clock that checks them once a second.

A timer for each request would take more time than the parsing of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import NamedTuple, Protocol

TICK_S = 1.0


class Timeouts(NamedTuple):
    """The timeouts of a connection, in seconds."""

    keep_alive: int  # longest wait for a request
    head: int  # longest time that a request's head may take
    body: int  # longest time of a body, in addition to its bytes divided by `body_rate`
    body_idle: int  # longest pause between two reads of a body
    write: int  # longest time for which a client may read nothing of its response
    body_rate: int = 16 << 10  # bytes per second


class TimedConnection(Protocol):
    """A connection that checks its timeouts at each tick of the clock."""

    def on_tick(self) -> None:
        """Count a second and check the timeouts."""


class Clock:
    """A clock that ticks as long as the server has connections."""

    def __init__(self, connections: Collection[TimedConnection]) -> None:
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start ticking, unless the clock ticks already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for connection in list(self._connections):
            connection.on_tick()
        if self._connections:
            self.start()
