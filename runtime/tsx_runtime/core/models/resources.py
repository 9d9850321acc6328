"""The resources that all versions of a server share."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator

from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.core.models.plan import VersionPlan
from tsx_runtime.core.placement.hardware import gpu_count
from tsx_runtime.core.placement.placement import CoreSharing, least_used, machine
from tsx_runtime.core.scheduling.channel import Channel
from tsx_runtime.core.workers.forked import Starter
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.feature import Feature
from tsx_runtime.plugins import load_plugins
from tsx_runtime.settings.schema import Settings

FIRST_WORKER_ID = 9000  # In TorchServe, it is the port of the first worker.


class ServerResources:
    """The resources that all versions of this server share."""

    def __init__(
        self,
        settings: Settings,
        starter: Starter,
        workers: Callable[[], list[Worker]],
        worker_output: str = "",
    ) -> None:
        """Load the plugins, and find the hardware.

        For `worker_output` see `LoadOrder.output`.

        Raises:
            SettingError: A plugin does not load, or this machine cannot follow the settings.
        """
        self.settings = settings
        self.starter = starter
        self.workers = workers  # returns the workers of all versions
        self.plugins = load_plugins(settings.plugins)
        self.worker_output = worker_output
        self.features: list[Feature] = []
        self.background = TaskGroup()
        self.ids = itertools.count(FIRST_WORKER_ID)  # the ids of future workers
        gpus = gpu_count()
        # The number of GPUs in use.
        self.gpus = gpus if settings.number_of_gpu is None else min(settings.number_of_gpu, gpus)
        self.machine = machine(
            settings.cpu_launcher_enable, settings.cpu_launcher_args, os.environ, settings.cpus
        )
        self.cores = CoreSharing(self.machine.cores, self._serving_channels)

    def choose_gpus(self, plan: VersionPlan) -> tuple[int, ...]:
        """Choose the GPUs for one more worker: those with the fewest workers of all models."""
        used = Counter(gpu for worker in self.workers() for gpu in worker.gpus)
        return least_used(plan.gpus, used, plan.parallel.gpus)

    def _serving_channels(self) -> Iterator[Channel]:
        for worker in self.workers():
            if worker.state is WorkerState.READY and worker.channel is not None:
                yield worker.channel
