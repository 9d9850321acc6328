"""The feature `rollouts`, which moves requests to a new version in steps."""

from __future__ import annotations

import asyncio

from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import Feature, ServerApp
from tsx_runtime.features.rollouts.controller import RolloutController


class RolloutsFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.rollouts = RolloutController(
            registry.traffic_manager,
            registry.state,
            is_stopping=lambda: registry.stopping,
            quality_source=lambda: registry.quality_source,
        )

    def add_routes(self, app: ServerApp) -> None:
        if "management" in app.roles:
            from tsx_runtime.features.rollouts import routes  # imports FastAPI

            limit = app.context.max_management_body
            app.add_routes(routes.build_router(self.registry, self.rollouts, limit))

    def begin_close(self) -> None:
        self.rollouts.close()

    async def close(self) -> None:
        await asyncio.to_thread(self.rollouts.logs.close)
