"""The feature `shadows`, which copies requests to another version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsx_runtime.feature import Feature
from tsx_runtime.metrics.version_metrics import add_shadows

if TYPE_CHECKING:
    from tsx_runtime.http.app import ServerApp
    from tsx_runtime.metrics.exposition import Families


class ShadowsFeature(Feature):
    def add_routes(self, app: ServerApp) -> None:
        if "management" in app.roles:
            from tsx_runtime.http.routes import shadow  # imports FastAPI

            router = shadow.build_router(self.registry, app.context.max_management_body)
            app.add_routes(router)

    async def add_metrics(self, families: Families, host: str) -> None:
        add_shadows(families, self.registry.shadows.all(), host)
