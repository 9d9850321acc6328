"""The feature `tracing`, which sends spans of requests to a collector."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from tsx_runtime.feature import Feature, ServerApp
from tsx_runtime.features.tracing.otlp import tracing
from tsx_runtime.features.tracing.requests import traced
from tsx_runtime.features.tracing.settings import TracingSettings

if TYPE_CHECKING:
    from tsx_runtime.api.messages import App, Scope


class TracingFeature(Feature):
    @contextmanager
    def serving(self) -> Iterator[None]:
        settings = TracingSettings.of(self.registry.settings)
        with tracing(settings, os.environ) as self.registry.tracer:
            yield

    def add_routes(self, app: ServerApp) -> None:
        tracer = self.registry.tracer
        if tracer:

            def trace(inner: App, scope: Scope) -> App:
                return partial(traced, tracer, inner)

            # Features add wrappers in the order of their names, and each wrapper encloses the
            # earlier ones. So the span of a request includes the time in `jobs`.
            app.wrappers.append(trace)
