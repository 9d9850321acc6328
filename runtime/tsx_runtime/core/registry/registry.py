"""The facade over all models: register, find, scale, set default, unregister."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from tsx_runtime.core.comparison.quality import QualitySource
from tsx_runtime.core.concurrency.periodic import repeat, running
from tsx_runtime.core.hidden_credentials import HiddenHeaders, hidden_variables
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.models.resources import ServerResources
from tsx_runtime.core.persistence import StateStore, state_directory
from tsx_runtime.core.registry.downloads import Downloads
from tsx_runtime.core.registry.model_table import ModelTable
from tsx_runtime.core.registry.registration import Registrar
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.core.telemetry.tracing import Tracer
from tsx_runtime.core.workers.forked import ProcessStarter, Starter
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.errors import BadRequest, CannotRemoveDefault, Conflict
from tsx_runtime.feature import Feature, load_features
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import Trust

FeatureT = TypeVar("FeatureT", bound=Feature)


class Registry:
    """All models of this server. It is not thread-safe: only the event loop uses it."""

    def __init__(
        self,
        settings: Settings,
        worker_files: int | None = None,
        worker_output: str = "",
        starter: Starter | None = None,
        *,
        replaces: bool = False,
    ) -> None:
        """Prepare an empty registry.

        Args:
            settings: The settings of the server.
            worker_files: The limit of a worker's open files; None: the limit of this process.
            worker_output: See `LoadOrder.output`.
            starter: Starts workers in another way than as processes.
            replaces: Whether this server replaces another one at its addresses, which ends soon.
        """
        self.settings = settings
        self.bytes_in_flight = ByteBudget(
            max(settings.max_inflight_bytes, 2 * settings.max_request_size)
        )
        self.hidden_headers = HiddenHeaders(settings)
        self.state = StateStore(state_directory(settings), replaces=replaces)
        starter = starter or ProcessStarter(
            preload=settings.worker_preload,
            worker_files=worker_files,
            hidden=hidden_variables(settings, os.environ),
        )
        self.resources = resources = ServerResources(
            settings, starter, self._all_workers, worker_output
        )
        self.plugins, self.features = resources.plugins, resources.features
        self.downloads = Downloads(settings, self.plugins.sources)
        self._table = table = ModelTable(settings, self.state, self.downloads, resources.background)
        self.models, self.withdraw, self.discard = table.models, table.withdraw, table.discard
        # Reasons why models of a snapshot could not be loaded at the start, by name and version.
        self.not_loaded: dict[tuple[str, str], str] = {}
        self.on_change, self.on_managed, self.on_readiness = (
            table.on_change,
            table.on_managed,
            table.on_readiness,
        )
        self.traffic_manager = traffic = table.traffic
        self.find, self.route, self.set_default = (
            traffic.find,
            traffic.route,
            traffic.set_default,
        )
        self.traffic, self.set_traffic, self.shares = (
            traffic.traffic,
            traffic.set_traffic,
            traffic.shares,
        )
        # The names of models that a replica of Ray registers at their first request.
        self.loaded_on_request: Collection[str] = ()
        # It is set before the first request if requests are traced.
        self.tracer: Tracer | None = None
        # The feature that knows the quality of versions sets it.
        self.quality_source: QualitySource | None = None
        self.stopping = False  # If true, load balancers are told to send no more requests.
        self._registrar = registrar = Registrar(table, resources, self.downloads)
        self.register_path, self.register_archive, self.opening = (
            registrar.from_path,
            registrar.from_archive,
            registrar.opening,
        )
        self.features += load_features(self)

    def warm_up(self, paths: Iterable[Path] = ()) -> None:
        """Start the process that forks workers; it imports what the models in `paths` need."""
        self.resources.starter.warm_up(paths)

    @property
    def names(self) -> list[str]:
        """The names of all models that can be requested."""
        return sorted({*self.models, *self.loaded_on_request})

    def stop(self) -> None:
        """Report that the server is not ready; it still answers requests."""
        self.stopping = True
        self._table.notify_readiness()

    async def register(
        self, order: RegisterOrder, *, wait: bool = True, trust: Trust = Trust.CLIENT
    ) -> ModelVersion:
        """Register an archive of the model store, or of a URL, which is downloaded there.

        With `wait`, return when its workers are ready. If they fail, it is not registered.

        Raises:
            ModelNotFound: There is no such archive.
            BadRequest: The archive cannot be used.
            Conflict: The version is already registered.
            LoadFailed: A worker could not load the model.
            DownloadFailed: The download failed.
            ModelFileExists: The model store already has a file of that name.
        """
        version = await self._registrar.from_url(order, wait=wait, trust=trust)
        self.not_loaded.pop((version.name, version.version), None)
        self._table.notify_managed()
        return version

    async def scale(
        self,
        name: str,
        version: str | None,
        min_workers: int,
        max_workers: int | None = None,
        *,
        wait: bool = True,
        changes: Mapping[str, int] | None = None,
    ) -> None:
        """Set the number of workers, and change the limits in `changes`.

        Raises:
            BadRequest: The values contradict each other; nothing is changed.
            ModelNotFound: There is no such model.
            ModelVersionNotFound: There is no such version.
            LoadFailed: A worker could not load the model (only with `wait`).
        """
        maximum = min_workers if max_workers is None else max_workers
        if min_workers < 0 or maximum < min_workers:
            raise BadRequest("max_worker cannot be less than min_worker.")
        target = self.find(name, version)
        target.check_changes(changes or {})
        scaling = target.scale(min_workers, maximum)
        target.is_scaled_by_client = True
        if changes:
            target.change(changes)
        if wait:
            await scaling
        else:
            self.resources.background.load(scaling)
        self._table.notify_managed()

    def change(self, name: str, version: str | None, changes: Mapping[str, int]) -> ModelVersion:
        """Change limits of a version, by names of CHANGEABLE.

        Raises:
            BadRequest: The values contradict each other.
            ModelNotFound: There is no such model.
            ModelVersionNotFound: There is no such version.
        """
        target = self.find(name, version)
        target.check_changes(changes)
        target.change(changes)
        self._table.notify_managed()
        return target

    async def unregister(self, name: str, version: str | None = None) -> None:
        """Stop requests to a version, and remove it once its accepted requests are answered.

        A model that could not be loaded at the start is only forgotten.

        Raises:
            CannotRemoveDefault: The version is the default one of several.
            CleanupTimeout: The requests took too long; the version is registered again.
        """
        not_loaded = self.not_loaded_of(name, version)
        if not_loaded and (version is not None or name not in self.models):
            for key in not_loaded:
                del self.not_loaded[key]
        else:
            target = self.find(name, version)
            if target.workflow:
                raise Conflict(
                    f"Model {name} is a node of workflow {target.workflow}. Unregister the"
                    f" workflow: DELETE /workflows/{target.workflow}"
                )
            other_versions = [
                version for version in self.models[name].versions if version != target.version
            ]
            if target.version == self.models[name].default and other_versions:
                raise CannotRemoveDefault(
                    f"Cannot remove default version for model {name}. Version {target.version} is"
                    f" the default: set another one first (`tsx models set-default {name}"
                    f" {other_versions[0]}`), or to remove all versions, first remove"
                    f" {', '.join(other_versions)}."
                )
            await self.withdraw(target)
        if name not in self.models and not self.not_loaded_of(name):
            self._table.traffic.forget(name)
        self._table.notify_managed()

    def not_loaded_of(self, name: str, version: str | None = None) -> dict[tuple[str, str], str]:
        """Return the entries of `not_loaded` for one version of a model, or for all of them."""
        return {
            key: reason
            for key, reason in self.not_loaded.items()
            if key[0] == name and version in (None, key[1])
        }

    def feature(self, kind: type[FeatureT]) -> FeatureT:
        """Return the feature that is an instance of this class."""
        return next(feature for feature in self.features if isinstance(feature, kind))

    def open(self) -> None:
        """Prepare the features to serve clients; see `Feature.open`."""
        for feature in self.features:
            feature.open()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background tasks of a server that answers requests."""
        async with AsyncExitStack() as stack:
            for feature in self.features:
                await stack.enter_async_context(feature.running())
            await stack.enter_async_context(
                running("cores are not shared anew", repeat(1.0, self.resources.cores.share))
            )
            yield

    async def close(self, drain: float = 0.0) -> None:
        """End all workers, after accepted requests had up to `drain` seconds."""
        self.downloads.close()
        # The last callback runs first; if one fails, the others still run.
        async with AsyncExitStack() as stack:
            for close in (self.resources.starter.close, self.state.close):
                stack.push_async_callback(asyncio.to_thread, close)
            for feature in self.features:
                stack.push_async_callback(feature.close)
            stack.push_async_callback(self.resources.background.wait_all)
            stack.push_async_callback(self._table.close, drain)
            for feature in self.features:
                stack.callback(feature.begin_close)

    def all_versions(self) -> Iterable[ModelVersion]:
        """Return all versions, including those that start or end."""
        return self._table.all()

    def workers(self) -> list[Worker]:
        """Return the workers of all versions that get requests."""
        return [worker for version in self.versions() for worker in version.workers]

    def versions(self) -> list[ModelVersion]:
        """Return all versions that get requests."""
        return [version for model in self.models.values() for version in model.versions.values()]

    def _all_workers(self) -> list[Worker]:
        return [worker for version in self._table.all() for worker in version.workers]
