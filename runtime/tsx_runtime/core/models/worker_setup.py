"""The setup of a version's workers: their devices, their program and their load order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tsx_archiver import OpenArchive
from tsx_runtime import wire
from tsx_runtime.core.models.handlers import chosen_handler, handler_of
from tsx_runtime.core.models.load_order import envelope_of, load_order
from tsx_runtime.core.models.plan import RegisterOrder, VersionPlan
from tsx_runtime.core.models.resources import ServerResources
from tsx_runtime.core.placement.placement import WorkerPlacement, placement_of
from tsx_runtime.core.workers.launch import Launch, ModelEnvironment, Sandbox, launch_of
from tsx_runtime.core.workers.worker import Worker


@dataclass
class WorkerSetup:
    """The devices, the program and the load order of each worker of a version."""

    name: str
    version: str
    archive: OpenArchive
    order: RegisterOrder
    plan: VersionPlan  # the current plan, which a later start uses
    host: ServerResources
    environment: ModelEnvironment | None
    workers: Callable[[], Sequence[Worker]]  # returns the workers of the version
    # Returns the sandbox in which a worker must run a program, or None.
    sandbox: Callable[[Worker, Launch], Sandbox | None]

    def __post_init__(self) -> None:
        archive, settings = self.archive, self.host.settings
        self.envelope = envelope_of(archive, settings)
        self.runtime = self.order.runtime or archive.manifest.runtime
        self.handler = handler_of(
            archive,
            chosen_handler(archive, self.order.handler, settings.default_service_handler),
            self.runtime,
        )

    def launch(self, worker: Worker) -> Launch | None:
        """Return how to start the worker as a program, or None if it can be forked."""
        launch = launch_of(
            self.plan.parallel,
            self.environment,
            threads=self._placement(worker).threads,
            group_name=f"{self.name}_{worker.id}",
        )
        program = launch or Launch()
        sandbox = self.sandbox(worker, program)
        return launch if sandbox is None else program._replace(sandbox=sandbox)

    def load_order(self, worker: Worker) -> wire.LoadOrder:
        return load_order(
            self.archive,
            self.plan,
            self._placement(worker),
            self.host.settings,
            name=self.name,
            version=self.version,
            handler=self.handler,
            envelope=self.envelope,
            worker=worker.id,
            gpus=len(worker.gpus),
            properties={
                key: value
                for feature in self.host.features
                for key, value in feature.handler_properties(self.name).items()
            },
            output=self.host.worker_output,
        )

    def _placement(self, worker: Worker) -> WorkerPlacement:
        workers = self.workers()
        return placement_of(
            self.host.machine,
            self.plan.parallel,
            threads=self.plan.threads,
            # A worker that is ending is not in the list, and its placement does not matter.
            worker=workers.index(worker) if worker in workers else 0,
            workers=len(workers),
            gpus=worker.gpus,
            sharing=len(self.host.workers()),
        )
