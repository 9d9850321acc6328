"""Apps of listeners without routes and models."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.context import ServerContext
from tsx_runtime.http.lanes import make_lane
from tsx_runtime.http.routes.exception_handlers import add_exception_handlers
from tsx_runtime.plugins import Plugins
from tsx_runtime.settings.schema import Settings


def bare_context(settings: Settings) -> ServerContext:
    registry: Any = SimpleNamespace(
        plugins=Plugins(), bytes_in_flight=ByteBudget(settings.max_inflight_bytes), tracer=None
    )
    return ServerContext(settings, registry)


def bare_app(settings: Settings) -> ServerApp:
    app = ServerApp(bare_context(settings))
    app.lane_of = cache(partial(make_lane, app))
    add_exception_handlers(app, app.not_found)
    return app
