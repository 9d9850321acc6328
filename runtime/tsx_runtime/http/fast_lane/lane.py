"""What the connections of one listener share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tsx_runtime.http.fast_lane.connection_clock import Clock
from tsx_runtime.http.fast_lane.exchange import Exchange
from tsx_runtime.http.fast_lane.heads import Heads
from tsx_runtime.http.fast_lane.response_heads import Lines
from tsx_runtime.http.fast_lane.tracing import some_traced
from tsx_runtime.http.fast_lane.turns import Turns
from tsx_runtime.http.semantics.access_log import LoggedExchange, some_logged
from tsx_runtime.http.semantics.server_timing import sometimes_timed

if TYPE_CHECKING:
    from tsx_runtime.http.app import ServerApp


class Lane:
    def __init__(self, app: ServerApp, connections: Any) -> None:
        predictions = app.predictions
        if predictions is not None and predictions.guard is not None and predictions.guard.plugins:
            predictions = None  # what a plugin says of a head may be otherwise the next time, so none is remembered
        self.heads = (
            None
            if predictions is None
            else Heads(
                predictions.registry,
                predictions.guard,
                predictions.limit,
                app.max_header_size,
                app.max_headers,
                traced=app.tracer is not None,
                platform=app.platform,
                has_route=app.has_route,
            )
        )
        self.counts = app.counts
        self.bytes_in_flight = app.bytes_in_flight
        self.lines = Lines(app.cors)
        self.log = app.access_log
        self.exchange: Callable[..., Exchange] = Exchange
        if app.access_log is not None:
            self.exchange = LoggedExchange if app.access_log.share >= 1.0 else some_logged(app.access_log)
        if app.tracer is not None:
            self.exchange = some_traced(app.tracer, self.exchange)
        if app.server_timing_share > 0:
            self.exchange = sometimes_timed(self.exchange, app.server_timing_share)
        self.timeouts = app.timeouts
        self.max_head = app.max_header_size
        self.clock = Clock(connections)
        self.turns = Turns(asyncio.get_running_loop())
