"""The feature `rollouts`, which moves requests to a new version in steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsx_runtime.feature import Feature

if TYPE_CHECKING:
    from tsx_runtime.http.app import ServerApp


class RolloutsFeature(Feature):
    def add_routes(self, app: ServerApp) -> None:
        if "management" in app.roles:
            from tsx_runtime.http.routes import rollout  # imports FastAPI

            router = rollout.build_router(self.registry, app.context.max_management_body)
            app.add_routes(router)
