"""The feature `shadows`, which copies requests to another version."""

from __future__ import annotations

from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import Families, Feature, ServerApp
from tsx_runtime.features.shadows.manager import ShadowManager
from tsx_runtime.features.shadows.metrics import add_shadows


class ShadowsFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.shadows = ShadowManager(registry.traffic_manager, registry.plugins.comparisons)

    def add_routes(self, app: ServerApp) -> None:
        if "management" in app.roles:
            from tsx_runtime.features.shadows import routes  # imports FastAPI

            limit = app.context.max_management_body
            app.add_routes(routes.build_router(self.registry, self.shadows, limit))

    async def add_metrics(self, families: Families, host: str) -> None:
        add_shadows(families, self.shadows.all(), host)

    def begin_close(self) -> None:
        self.shadows.close()
