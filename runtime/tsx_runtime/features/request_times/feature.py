"""The feature `request_times`, which shows where the time of a request went."""

from __future__ import annotations

from tsx_runtime.feature import Feature, ServerApp


class RequestTimesFeature(Feature):
    def add_routes(self, app: ServerApp) -> None:
        if "management" in app.roles:
            from tsx_runtime.features.request_times import routes  # imports FastAPI

            router = routes.build_router(self.registry)
            app.add_routes(router, {"debug": app.context.guards.management})
