"""The feature `ui`, which adds the web page."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tsx_runtime.core.concurrency.periodic import repeat, running
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import Feature, ServerApp
from tsx_runtime.features.ui.time_series import TimeSeries


class UiFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.series = TimeSeries(registry.models.values)

    def add_routes(self, app: ServerApp) -> None:
        from tsx_runtime.features.ui import api_page, routes

        app.include_router(api_page.build_router())
        if "management" in app.roles:
            routes.add_page(app, self.series)

    def running(self) -> AbstractAsyncContextManager[None]:
        return running("charts stand still", repeat(1.0, self.series.sample))
