"""The feature `traffic`, which splits requests between versions."""

from __future__ import annotations

from tsx_runtime.feature import Feature, ServerApp


class TrafficFeature(Feature):
    def add_routes(self, app: ServerApp) -> None:
        if "management" in app.roles:
            from tsx_runtime.features.traffic import routes  # imports FastAPI

            app.add_routes(routes.build_router(self.registry, app.context.max_management_body))
