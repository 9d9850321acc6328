"""The creation of a listener's fast lane from its app."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, cast

from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.connection_clock import Clock, TimedConnection
from tsx_runtime.http.fast_lane.heads import Heads
from tsx_runtime.http.fast_lane.lane import Lane
from tsx_runtime.http.fast_lane.response_heads import ResponseHeadCache
from tsx_runtime.http.turns import Turns

if TYPE_CHECKING:
    from uvicorn.server import ServerState


def make_lane(app: ServerApp, server_state: ServerState) -> Lane:
    """Create the lane of a listener; the app has all its routes by now."""
    settings, predictions, tracer = (
        app.context.settings,
        app.predictions,
        app.context.registry.tracer,
    )
    heads = None
    # A plugin may refuse a head that it has accepted before, so heads cannot be cached.
    if predictions is not None and not (predictions.guard and predictions.guard.plugins):
        heads = Heads(
            predictions.registry,
            predictions.guard,
            predictions.limit,
            settings.max_header_size,
            traced=tracer is not None,
            platform=app.platform,
            missing_route=app.missing_route,
        )
    return Lane(
        heads,
        ResponseHeadCache(
            server_state,
            app.admission.cors,
            is_confined=predictions is not None and predictions.is_confined,
        ),
        Clock(cast("Collection[TimedConnection]", server_state.connections)),
        Turns(asyncio.get_running_loop()),
        app.counts,
        app.context.bytes_in_flight,
        app.timeouts,
        settings.max_header_size,
        0 if predictions is None else predictions.limit,
        app.admission.clients,
        app.access_log,
        tracer,
        settings.server_timing_share,
    )
