"""State that the connections of one listener share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Protocol, cast

from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access.client_limits import ClientLimits
from tsx_runtime.api.access_log import AccessLog
from tsx_runtime.api.headers import Pair
from tsx_runtime.api.messages import PlatformHook
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.core.telemetry.tracing import Tracer
from tsx_runtime.errors import ResourceNotFound
from tsx_runtime.http.connection_clock import Clock, TimedConnection, Timeouts
from tsx_runtime.http.fast_lane.heads import Heads
from tsx_runtime.http.fast_lane.response_heads import ResponseHeadCache
from tsx_runtime.http.turns import Turns
from tsx_runtime.metrics.response_counts import ResponseCounts

if TYPE_CHECKING:
    from uvicorn.server import ServerState


@dataclass(eq=False)
class Lane:
    """The settings, counters and caches of one listener's connections."""

    server_state: ServerState
    counts: ResponseCounts
    bytes_in_flight: ByteBudget
    timeouts: Timeouts
    max_head: int  # bytes
    max_message_size: int  # bytes of a body, or of a message of a WebSocket
    cors: InitVar[tuple[Pair, ...]]
    # the answer to a path for which FastAPI has no route
    missing: InitVar[Callable[[str], ResourceNotFound | None]]
    registry: InitVar[Registry | None]  # None: the listener has no predictions
    guard: InitVar[Guard | None]  # of predictions
    platform: InitVar[PlatformHook | None]
    clients: ClientLimits | None
    log: AccessLog | None
    tracer: Tracer | None
    timing_share: float  # of answers that have Server-Timing without being asked for it
    confined: InitVar[bool]  # see `answer_headers`

    def __post_init__(
        self,
        cors: tuple[Pair, ...],
        missing: Callable[[str], ResourceNotFound | None],
        registry: Registry | None,
        guard: Guard | None,
        platform: PlatformHook | None,
        confined: bool,
    ) -> None:
        self.heads = None
        # Plugins may decide otherwise about the same head the next time.
        if registry is not None and not (guard is not None and guard.plugins):
            self.heads = Heads(
                registry,
                guard,
                self.max_message_size,
                self.max_head,
                traced=self.tracer is not None,
                platform=platform,
                missing=missing,
            )
        self.response_heads = ResponseHeadCache(self.server_state, cors, confined=confined)
        self.clock = Clock(cast("Collection[TimedConnection]", self.server_state.connections))
        self.turns = Turns(asyncio.get_running_loop())


class LaneApp(Protocol):
    """The ASGI application of a listener."""

    leaving: bool

    def lane_of(self, server_state: ServerState) -> Lane:
        """Return the lane of its listener, which the first connection makes."""
