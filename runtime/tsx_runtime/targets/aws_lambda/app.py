"""The inference routes behind Lambda's events.

Predictions are answered directly. The other routes need FastAPI, whose import and routes take a
tenth of a cold start. It is imported at their first request.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tsx_runtime.api.access.auth import build_guards
from tsx_runtime.api.access.tokens import build_keys
from tsx_runtime.api.headers import clashing_names
from tsx_runtime.api.messages import Receive, Scope, Send
from tsx_runtime.api.request_options import IDEMPOTENCY_KEY
from tsx_runtime.api.urls import runs_model
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.http.asgi_lane.predictions import Predictions
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings


class LambdaApp:
    """An ASGI app like `ServerApp` with the role of inference."""

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self._registry = registry
        self._settings = settings
        guard = build_guards(
            settings, build_keys(settings), registry.plugins.authentication.values()
        ).inference
        share = settings.server_timing_share
        self._predictions = Predictions(
            registry, settings.max_request_size, guard, ResponseCounts(), _describe, share
        )
        # These settings wrap every route.
        self._wraps_routes = bool(settings.cors_allowed_origin or settings.access_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["root_path"]:
            path = path.removeprefix(scope["root_path"])
        # The full app refuses requests with an idempotency key, or whose headers clash.
        is_refused = clashing_names(scope["headers"]) or any(
            name == IDEMPOTENCY_KEY for name, _ in scope["headers"]
        )
        if self._wraps_routes or is_refused or not runs_model(path):
            await self._full_app(scope, receive, send)
        else:
            scope["path"], scope["root_path"] = path, ""
            await self._predictions(scope, receive, send)

    @cached_property
    def _full_app(self) -> Any:
        from tsx_runtime.http.app import build_apps  # imported late, see above

        [app] = build_apps(self._registry, self._settings, [("inference",)])
        return app


def _describe(model: str) -> dict[str, Any]:
    from tsx_runtime.http.routes.openapi import describe_predictions  # imported late, see above

    return describe_predictions(model)
