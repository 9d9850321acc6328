"""The state that the connections of one listener share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tsx_runtime.api.access.client_limits import ClientLimits
from tsx_runtime.api.access_log import AccessLog
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.core.telemetry.tracing import Tracer
from tsx_runtime.http.connection_clock import Clock, Timeouts
from tsx_runtime.http.fast_lane.heads import Heads
from tsx_runtime.http.fast_lane.response_heads import ResponseHeadCache
from tsx_runtime.http.turns import Turns
from tsx_runtime.metrics.response_counts import ResponseCounts

if TYPE_CHECKING:
    from uvicorn.server import ServerState


@dataclass(eq=False)
class Lane:
    """The settings, counters and caches of one listener's connections."""

    heads: Heads | None  # None if all requests take the ASGI lane
    response_heads: ResponseHeadCache
    clock: Clock
    turns: Turns
    counts: ResponseCounts
    bytes_in_flight: ByteBudget
    timeouts: Timeouts
    max_head: int  # bytes
    max_message_size: int  # bytes of a WebSocket's message; 0 means no WebSockets
    clients: ClientLimits | None
    log: AccessLog | None
    tracer: Tracer | None
    timing_share: float  # share of responses that have Server-Timing unasked


class LaneApp(Protocol):
    """The ASGI application of a listener."""

    leaving: bool  # whether another server accepts new connections

    def lane_of(self, server_state: ServerState) -> Lane:
        """Return the lane of its listener, which the first connection creates."""
