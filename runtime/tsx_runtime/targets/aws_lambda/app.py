"""The ASGI app for HTTP requests in Lambda's events: the inference routes.

Predictions bypass FastAPI. The other routes need it, but its import takes a tenth of a cold start.
Therefore it is imported only at the first request for such a route.
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
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.http.asgi_lane.predictions import Predictions
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings


class LambdaApp:
    """An ASGI app with the same routes as a `ServerApp` for inference."""

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self._registry = registry
        self._settings = settings
        guard = build_guards(
            settings, build_keys(settings), registry.plugins.authentication.values()
        ).inference
        timing_share = settings.server_timing_share
        self._predictions = Predictions(
            registry, settings.max_request_size, guard, ResponseCounts(), _describe, timing_share
        )
        # With these settings, even predictions need the full app.
        self._wraps_routes = bool(settings.cors_allowed_origin or settings.access_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["root_path"]:
            path = path.removeprefix(scope["root_path"])
        # The full app handles requests with an idempotency key, and refuses clashing header names.
        needs_full_app = clashing_names(scope["headers"]) or any(
            name == IDEMPOTENCY_KEY for name, _ in scope["headers"]
        )
        if self._wraps_routes or needs_full_app or not runs_model(path):
            await self._full_app(scope, receive, send)
        else:
            scope["path"], scope["root_path"] = path, ""
            await self._predictions(scope, receive, send)

    @cached_property
    def _full_app(self) -> Any:
        # The import is deferred, as the module's docstring explains.
        from tsx_runtime.http.build import build_apps

        [app] = build_apps(self._registry, self._settings, [("inference",)])
        return app


def _describe(version: ModelVersion) -> dict[str, Any]:
    # The import is deferred, as the module's docstring explains.
    from tsx_runtime.http.routes.model_paths import describe_predictions

    return describe_predictions(version)
