"""The feature `isolation`, which starts workers in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from tsx_archiver.storage.private_directory import private_directory
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.strategies import EntryPoint
from tsx_runtime.core.workers.launch import Launch, Sandbox
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.errors import BadRequest
from tsx_runtime.feature import Feature
from tsx_runtime.features.isolation.config import KernelSandbox, check_isolation, isolation_of


class IsolationFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        check_isolation(registry.settings)

    def check_installation(self, model: str, requirements_file: str) -> None:
        if isolation_of(self.registry.settings, model) is not None:
            raise BadRequest(
                f"Model {model} runs isolated, but pip would run code of the packages in"
                f" {requirements_file} outside the isolation. Install them where the server runs,"
                " and remove the file from the archive, or set install_py_dep_per_model = false."
            )

    def around(self, version: ModelVersion, entry: EntryPoint) -> EntryPoint | None:
        model = version.name
        if (
            isolation_of(self.registry.settings, model) is not None
            and version.plan.parallel.is_group
        ):
            raise BadRequest(
                f"Model {model} runs isolated, but its model-config.yaml asks for a torchrun group,"
                " whose processes need the network. "
                f'Set isolation = "off" in [models.{model}], or remove torchrun and parallelType'
                " from model-config.yaml."
            )
        return None

    def sandbox(self, version: ModelVersion, worker: Worker, program: Launch) -> Sandbox | None:
        isolation = isolation_of(self.registry.settings, version.name)
        if isolation is None:
            return None
        for directory in version.readable:
            # The sandbox ignores a directory that is missing at the start of the process.
            with suppress(OSError):
                private_directory(directory)
        return KernelSandbox(
            isolation,
            [str(version.archive.directory), *program.readable, *map(str, version.readable)],
            gpu=bool(worker.gpus),
            output=self.registry.resources.worker_output,
            label=f"W-{worker.id}-{version.name}_{version.version}",
        )

    def describe(self, version: ModelVersion) -> Mapping[str, object]:
        isolation = isolation_of(self.registry.settings, version.name)
        return {} if isolation is None else {"isolation": isolation.describe()}
