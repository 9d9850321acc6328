"""The limits of WebSocket connections: those of the other connections of their listener."""

from __future__ import annotations

from typing import NamedTuple

from tsx_runtime.core.scheduling.byte_budget import ByteBudget


class SocketLimits(NamedTuple):
    max_size: int  # bytes of a message
    bytes_in_flight: ByteBudget
    body: int  # seconds for a message, and on top what its bytes take at `body_rate` a second
    body_rate: int
    write: int  # seconds for a client that takes nothing of its answers
