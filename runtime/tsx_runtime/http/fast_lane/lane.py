"""State that the connections of one listener share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

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


class LaneConfig(NamedTuple):
    counts: ResponseCounts
    bytes_in_flight: ByteBudget
    timeouts: Timeouts
    max_header_size: int
    max_request_size: int
    cors: tuple[Pair, ...]
    missing: Callable[
        [str], ResourceNotFound | None
    ]  # the answer to a path for which FastAPI has no route
    registry: Registry | None  # None: the listener has no predictions
    guard: Guard | None  # of predictions
    platform: PlatformHook | None
    clients: ClientLimits | None
    log: AccessLog | None
    tracer: Tracer | None
    timing_share: float  # of answers that have Server-Timing without being asked for it
    confined: bool  # see `answer_headers`


class LaneApp(Protocol):
    """The ASGI application of a listener."""

    lane: Lane | None
    leaving: bool

    def lane_config(self) -> LaneConfig: ...


class Lane:
    def __init__(self, config: LaneConfig, server_state: ServerState) -> None:
        asks_plugins = config.guard is not None and bool(
            config.guard.plugins
        )  # which may decide otherwise the next time
        self.heads = None
        if config.registry is not None and not asks_plugins:
            self.heads = Heads(
                config.registry,
                config.guard,
                config.max_request_size,
                config.max_header_size,
                traced=config.tracer is not None,
                platform=config.platform,
                missing=config.missing,
            )
        self.counts = config.counts
        self.bytes_in_flight = config.bytes_in_flight
        self.response_heads = ResponseHeadCache(server_state, config.cors, confined=config.confined)
        self.clients = config.clients
        self.log = config.log
        self.tracer = config.tracer
        self.timing_share = config.timing_share
        self.timeouts = config.timeouts
        self.max_head = config.max_header_size
        self.max_message_size = config.max_request_size  # of a WebSocket
        self.clock = Clock(cast("Collection[TimedConnection]", server_state.connections))
        self.turns = Turns(asyncio.get_running_loop())


def lane_of(app: LaneApp, server_state: ServerState) -> Lane:
    """Made by the first connection, when the app is complete."""
    if app.lane is None:
        app.lane = Lane(app.lane_config(), server_state)
    return app.lane
