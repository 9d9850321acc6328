"""The state that the connections of one listener share."""

from __future__ import annotations

from collections.abc import Callable
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
    """The settings, counters and caches for one listener's connections."""

    heads: Heads | None  # None if the other lane handles all requests
    response_heads: ResponseHeadCache
    clock: Clock
    turns: Turns
    counts: ResponseCounts
    bytes_in_flight: ByteBudget
    timeouts: Timeouts
    max_head: int  # largest head in bytes
    max_message_size: int  # largest WebSocket message in bytes; 0 means no WebSockets
    clients: ClientLimits | None
    log: AccessLog | None
    tracer: Tracer | None
    timing_share: (
        float  # fraction of responses that have Server-Timing without a client's request for it
    )


class LaneApp(Protocol):
    """The ASGI application of a listener."""

    is_replaced: bool  # whether another server accepts the new connections
    lane_of: Callable[[ServerState], Lane]  # returns the lane of its listener
