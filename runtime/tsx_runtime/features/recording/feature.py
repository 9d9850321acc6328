"""The feature `recording`, which records requests of models."""

from __future__ import annotations

from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import Feature, ServerApp
from tsx_runtime.features.recording.manager import RecordingManager
from tsx_runtime.features.recording.settings import RecordingSettings


class RecordingFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        headers = RecordingSettings.of(registry.settings).record_headers
        self.recorders = RecordingManager(registry.traffic_manager, registry.state, headers)

    def add_routes(self, app: ServerApp) -> None:
        if "management" in app.roles:
            from tsx_runtime.features.recording import routes  # imports FastAPI

            app.add_routes(
                routes.build_router(
                    self.recorders, self.registry.state, app.context.max_management_body
                )
            )

    async def close(self) -> None:
        await self.recorders.close()
