"""The feature `monitor`, which watches the inputs, answers and quality of models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.strategies import EntryPoint
from tsx_runtime.errors import SettingError
from tsx_runtime.feature import Families, Feature, Labels, ServerApp
from tsx_runtime.features.monitor.manager import MonitorManager
from tsx_runtime.features.monitor.metrics import MonitoredQuality, add_process, add_state
from tsx_runtime.features.monitor.settings import MonitorModelSettings, check_packages


class MonitorFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.manager = MonitorManager(registry)
        registry.quality_source = MonitoredQuality(self.manager)
        self._ending: asyncio.Task[None] | None = None
        models = registry.settings.models
        for name in models:
            if MonitorModelSettings.of(models, name).monitor:
                check_packages(f"monitor of [models.{name}]", SettingError)

    def around(self, version: ModelVersion, entry: EntryPoint) -> EntryPoint | None:
        if version.config.monitor:
            check_packages(f"monitor in the model-config.yaml of {version.name}")
        return None

    def open(self) -> None:
        self.manager.enable()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.manager.enable()  # Platforms such as SageMaker call only this.
        yield

    def add_routes(self, app: ServerApp) -> None:
        from tsx_runtime.features.monitor import routes  # imports FastAPI

        context = app.context
        if "management" in app.roles:
            app.add_routes(routes.build_router(self.manager, context.max_management_body))
        if "inference" in app.roles:
            router = routes.build_feedback_router(self.manager, context.settings.max_request_size)
            app.add_routes(router, {"feedback": context.guards.inference})

    def add_version_metrics(
        self, families: Families, version: ModelVersion, labels: Labels
    ) -> None:
        state = self.manager.states.get((version.name, version.version))
        if state is not None:
            add_state(families, state, labels)

    async def add_metrics(self, families: Families, host: str) -> None:
        add_process(families, self.manager, host)

    def hand_over(self) -> None:
        self._ending = self.manager.end()

    async def close(self) -> None:
        await (self._ending or self.manager.end())
