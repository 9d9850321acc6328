"""The feature `monitor`, which watches the inputs, answers and quality of models."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.strategies import EntryPoint
from tsx_runtime.feature import Families, Feature, Labels, ServerApp
from tsx_runtime.features.monitor.manager import MonitorManager
from tsx_runtime.features.monitor.metrics import MonitoredQuality, add_process, add_state
from tsx_runtime.features.monitor.settings import MonitorModelSettings, check_packages


class MonitorFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.manager = MonitorManager(registry)
        registry.quality_source = MonitoredQuality(self.manager)

    def around(self, version: ModelVersion, entry: EntryPoint) -> EntryPoint | None:
        # Requests take the usual way: this only refuses a model that cannot be monitored.
        setting = MonitorModelSettings.of(self.registry.settings.models, version.name).monitor
        if version.config.monitor if setting is None else setting:
            check_packages(f"monitor of model {version.name}")
        return None

    def open(self) -> None:
        self.manager.enable()

    def running(self) -> AbstractAsyncContextManager[None]:
        self.manager.enable()  # Platforms such as SageMaker call only this.
        return super().running()

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
        self.manager.end()

    async def close(self) -> None:
        self.manager.end()
        await self.manager.channel.wait_closed()
