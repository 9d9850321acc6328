"""State that the connections of one listener share."""

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

    heads: Heads | None  # None: every request is for the ASGI lane
    response_heads: ResponseHeadCache
    clock: Clock
    turns: Turns
    counts: ResponseCounts
    bytes_in_flight: ByteBudget
    timeouts: Timeouts
    max_head: int  # bytes
    max_message_size: int  # bytes of a message of a WebSocket; 0: there are none
    clients: ClientLimits | None
    log: AccessLog | None
    tracer: Tracer | None
    timing_share: float  # of answers that have Server-Timing without being asked for it


class LaneApp(Protocol):
    """The ASGI application of a listener."""

    leaving: bool

    def lane_of(self, server_state: ServerState) -> Lane:
        """Return the lane of its listener, which the first connection makes."""
