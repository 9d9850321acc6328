"""The feature `elastic`, which adapts the number of workers to load and memory."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tsx_runtime.core.concurrency.periodic import repeat, running
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.feature import Feature
from tsx_runtime.features.elastic.controller import ElasticController
from tsx_runtime.features.elastic.decision import INTERVAL_S
from tsx_runtime.features.elastic.memory import MemoryBudget
from tsx_runtime.features.elastic.settings import ElasticSettings
from tsx_runtime.metrics.gpu import gpu_processes


class ElasticFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        settings = ElasticSettings.of(registry.settings)
        self.budget = MemoryBudget(
            settings.model_memory,
            registry.versions,
            registry.all_versions,
            settings.model_gpu_memory,
            registry.resources.gpus,
            gpu_processes,
        )
        self.controller = ElasticController(
            registry.versions,
            self.budget,
            registry.resources.machine.cores,
            registry.resources.background.load,
        )

    def loading(self, version: ModelVersion, worker: Worker) -> AbstractAsyncContextManager[None]:
        return self.budget.reserve(version, worker)

    def running(self) -> AbstractAsyncContextManager[None]:
        adjusting = repeat(INTERVAL_S, self.controller.adjust)
        return running("models keep their number of workers", adjusting)
