"""The feature `recording`, which records requests of models."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tsx_runtime.core.concurrency.periodic import repeat, running
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import Feature, ServerApp
from tsx_runtime.features.recording.manager import RecordingManager


class RecordingFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.recorders = RecordingManager(registry)

    def add_routes(self, app: ServerApp) -> None:
        if "management" in app.roles:
            from tsx_runtime.features.recording import routes  # imports FastAPI

            app.add_routes(
                routes.build_router(
                    self.recorders, self.registry.state, app.context.max_management_body
                )
            )

    def running(self) -> AbstractAsyncContextManager[None]:
        recorders = self.recorders
        upload = repeat(recorders.upload_interval / 4, recorders.upload)
        return running("recordings are not uploaded", upload)

    async def before_freeze(self, seconds: float, *, ends: bool) -> None:
        await self.recorders.before_freeze(seconds, ends=ends)

    async def close(self) -> None:
        await self.recorders.close()
