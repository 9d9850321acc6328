"""The feature `recording`, which records requests of models."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tsx_runtime.core.concurrency.periodic import running
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import Feature, ServerApp
from tsx_runtime.features.recording.manager import RecordingManager
from tsx_runtime.features.recording.settings import RecordingSettings


class RecordingFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        settings = registry.settings
        self.recorders = RecordingManager(
            registry.traffic_manager,
            registry.state,
            RecordingSettings.of(settings),
            settings.models,
            settings.s3_endpoint_url,
        )

    def add_routes(self, app: ServerApp) -> None:
        if "management" in app.roles:
            from tsx_runtime.features.recording import routes  # imports FastAPI

            app.add_routes(
                routes.build_router(
                    self.recorders, self.registry.state, app.context.max_management_body
                )
            )

    def running(self) -> AbstractAsyncContextManager[None]:
        return running("recordings are not uploaded", self.recorders.upload_repeatedly())

    async def before_freeze(self, seconds: float, *, ends: bool) -> None:
        await self.recorders.before_freeze(seconds, ends=ends)

    async def close(self) -> None:
        await self.recorders.close()
