"""The setup of a version's workers: their devices, their program and their load order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tsx_archiver import OpenArchive
from tsx_runtime import wire
from tsx_runtime.core.environments.venvs import ModelEnvironment
from tsx_runtime.core.isolation.config import Sandbox, isolation_of
from tsx_runtime.core.models.handlers import chosen_handler, handler_of
from tsx_runtime.core.models.load_order import envelope_of, load_order
from tsx_runtime.core.models.plan import RegisterOrder, VersionPlan
from tsx_runtime.core.models.resources import ServerResources
from tsx_runtime.core.placement.placement import WorkerPlacement, placement_of
from tsx_runtime.core.workers.launch import Launch, launch_of
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.errors import BadRequest


class WorkerSetup:
    """What each process of a version's workers starts with."""

    def __init__(
        self,
        name: str,
        version: str,
        archive: OpenArchive,
        order: RegisterOrder,
        plan: VersionPlan,
        host: ServerResources,
        environment: ModelEnvironment | None,
        workers: Callable[[], Sequence[Worker]],
    ) -> None:
        """Choose the handler and the isolation.

        Raises:
            BadRequest: No worker of this server can run the archive.
        """
        settings = host.settings
        self.plan = plan  # A later start uses the current plan.
        self.isolation = isolation_of(settings, name)
        if self.isolation is not None and plan.parallel.is_group:
            raise BadRequest(
                f"Model {name} runs isolated, but its model-config.yaml asks for a torchrun group,"
                " whose processes need the network. "
                f'Set isolation = "off" in [models.{name}], or remove torchrun and parallelType'
                " from model-config.yaml."
            )
        self.envelope = envelope_of(archive, settings)
        self.runtime = order.runtime or archive.manifest.runtime
        self.handler = handler_of(
            archive,
            chosen_handler(archive, order.handler, settings.default_service_handler),
            self.runtime,
        )
        self._name = name
        self._version = version
        self._archive = archive
        self._host = host
        self._environment = environment
        self._workers = workers

    def launch(self, worker: Worker) -> Launch | None:
        """Return how to start the worker as a program, or None if it can be forked."""
        return launch_of(
            self.plan.parallel,
            self._environment,
            use_venv=bool(self._archive.config.use_venv),
            threads=self._placement(worker).threads,
            group_name=f"{self._name}_{worker.id}",
            sandbox=self._sandbox(worker),
        )

    def load_order(self, worker: Worker) -> wire.LoadOrder:
        return load_order(
            self._archive,
            self.plan,
            self._placement(worker),
            self._host.settings,
            name=self._name,
            version=self._version,
            handler=self.handler,
            envelope=self.envelope,
            worker=worker.id,
            gpus=len(worker.gpus),
            output=self._host.worker_output,
        )

    def _placement(self, worker: Worker) -> WorkerPlacement:
        workers = self._workers()
        return placement_of(
            self._host.machine,
            self.plan.parallel,
            threads=self.plan.threads,
            # A worker that is ending is not in the list, and its placement does not matter.
            worker=workers.index(worker) if worker in workers else 0,
            workers=len(workers),
            gpus=worker.gpus,
            sharing=self._host.count_workers(),
        )

    def _sandbox(self, worker: Worker) -> Sandbox | None:
        if self.isolation is None:
            return None
        environment = self._environment
        readable = [
            self._archive.directory,
            *([] if environment is None else [environment.directory]),
        ]
        return Sandbox(
            self.isolation,
            map(str, readable),
            gpu=bool(worker.gpus),
            output=self._host.worker_output,
            label=f"W-{worker.id}-{self._name}_{self._version}",
        )
