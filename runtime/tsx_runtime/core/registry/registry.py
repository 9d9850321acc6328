"""The models: register, find, scale, set default, unregister."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tsx_runtime.core.concurrency.task_group import Background
from tsx_runtime.core.environments.venvs import Environments
from tsx_runtime.core.isolation.config import check_isolation
from tsx_runtime.core.isolation.hidden_credentials import HiddenHeaders, hidden_variables
from tsx_runtime.core.models.model import Host, Model, ModelVersion
from tsx_runtime.core.models.plan import Plan, RegisterOrder
from tsx_runtime.core.persistence import State, state_directory
from tsx_runtime.core.placement.devices import gpu_count, least_used
from tsx_runtime.core.placement.placement import machine
from tsx_runtime.core.recording.manager import Recorders
from tsx_runtime.core.registry.archive_probe import holds_exported_program
from tsx_runtime.core.registry.downloads import Downloads
from tsx_runtime.core.registry.registration import Registering
from tsx_runtime.core.rollouts.controller import Rollouts
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.core.shadowing.manager import Shadows
from tsx_runtime.core.telemetry.tracing import Tracer
from tsx_runtime.core.traffic.manager import Splits
from tsx_runtime.core.workers.forked import ProcessStarter, Starter
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.errors import (
    BadRequest,
    CannotRemoveDefault,
    CleanupTimeout,
    Conflict,
    Unavailable,
)
from tsx_runtime.plugins import load_plugins
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import Trust

FIRST_WORKER_ID = 9000  # TorchServe's first worker port; here it is only a number


class Registry:
    """All models of this server. Not thread safe: it lives on the event loop."""

    def __init__(
        self, settings: Settings, worker_files: int | None = None, worker_output: str = "", starter: Starter | None = None
    ) -> None:
        """`worker_files`: how many files a worker may have open; as many as this process if not set. `worker_output`: see `LoadOrder`.

        `starter`: of workers that are no processes of their own.
        """
        check_isolation(settings)
        self.settings = settings
        self.bytes_in_flight = ByteBudget(max(settings.max_inflight_bytes, 2 * settings.max_request_size))
        self.hidden_headers = HiddenHeaders(settings)
        self.models: dict[str, Model] = {}
        self.state = State(state_directory(settings))
        configured = {name: own.traffic for name, own in settings.models.items() if own.traffic is not None}
        self.splits = splits = Splits(self.models, configured, self.state, self._tell_change)
        self.find, self.route = splits.find, splits.route
        self.traffic, self.set_traffic, self.shares = splits.traffic, splits.set_traffic, splits.shares
        self.observe, self.unobserve, self.on_traffic = splits.observe, splits.unobserve, splits.on_traffic
        self.rollouts = Rollouts(self)
        self.recorders = Recorders(self)
        self.tracer: Tracer | None = None  # set before anything is served, where requests are traced
        self.stopping = False  # a stop was asked for: no balancer should send anything more
        self.on_change: list[Callable[[], None]] = []  # called when a name or a version may mean another model than before
        self.on_managed: list[Callable[[], None]] = []  # called when what is served, or with what, was changed on request
        self.on_readiness: list[Callable[[], None]] = []  # called when a version may have become ready, or not ready any more
        self.gpus = gpu_count() if settings.number_of_gpu is None else min(settings.number_of_gpu, gpu_count())
        self._starter = starter or ProcessStarter(
            preload=settings.worker_preload, worker_files=worker_files, hidden=hidden_variables(settings, os.environ)
        )
        self._host = Host(
            settings,
            self._starter,
            machine(settings.cpu_launcher_enable, settings.cpu_launcher_args, os.environ.get("CUDA_VISIBLE_DEVICES")),
            itertools.count(FIRST_WORKER_ID),
            self._choose_gpus,
            worker_output,
        )
        self._environments = Environments(
            settings.cache_dir, timeout=settings.install_timeout, size=settings.max_environments_size, hidden=self._starter.hidden
        )
        self._taken: set[tuple[str, str]] = set()
        self._coming: set[ModelVersion] = set()  # not in `models` yet: each takes another's place once it has loaded
        self._leaving: set[ModelVersion] = set()  # out of `models`, but with requests to answer
        self.plugins = load_plugins(settings.plugins)
        self.shadows = Shadows(self.models, splits, self.plugins.comparisons)
        self._downloads = Downloads(settings, self.plugins.sources)
        self._background = Background()
        self._registering = registering = Registering(self, self._host, self._downloads, self._environments, self._background)
        self.register_path, self.register_archive = registering.from_path, registering.from_archive

    def warm_up(self, paths: Iterable[Path] = ()) -> None:
        """Have the process that workers come from import torch, and what `paths` will need, while the rest of the server starts."""
        self._starter.warm_up(exported=any(map(holds_exported_program, paths)))

    def stop(self) -> None:
        """Be ready no more; what is asked for is still done."""
        self.stopping = True
        self._tell_readiness()

    async def register(self, order: RegisterOrder, *, wait: bool = True, trust: Trust = Trust.CLIENT) -> ModelVersion:
        """Register from the model store, or from a URL by way of it. With `wait`, its workers are ready on return, or it is not registered.

        Raises ModelNotFound, BadRequest (the archive cannot be used), Conflict, LoadFailed, DownloadFailed, ModelFileExists.
        """
        version = await self._registering.from_url(order, wait=wait, trust=trust)
        self._tell_managed()
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
        """With `changes`, also do what `ModelVersion.change` does.

        Raises BadRequest, ModelNotFound, ModelVersionNotFound (then nothing is changed), LoadFailed (only with `wait`).
        """
        most = min_workers if max_workers is None else max_workers
        if min_workers < 0 or most < min_workers:
            raise BadRequest("max_worker cannot be less than min_worker.")
        found = self.find(name, version)
        scaling = found.scale(min_workers, most)
        found.scaled = True
        if changes:
            found.change(changes)
        if wait:
            await scaling
        else:
            self._background.load(scaling)
        self._tell_managed()

    def change(self, name: str, version: str | None, changes: Mapping[str, int]) -> ModelVersion:
        """Values for names of TUNABLE. Raises ModelNotFound, ModelVersionNotFound."""
        found = self.find(name, version)
        found.change(changes)
        self._tell_managed()
        return found

    def set_default(self, name: str, version: str, *, undoable: bool = True) -> None:
        """As `Splits.set_default`."""
        self.splits.set_default(name, version, undoable=undoable)
        self._tell_managed()

    def rollback(self, name: str) -> None:
        """As `Splits.rollback`, which may bring back another default version."""
        self.splits.rollback(name)
        self._tell_managed()

    async def unregister(self, name: str, version: str | None = None) -> None:
        """No new request finds it; what is accepted is answered first.

        Raises CannotRemoveDefault, and CleanupTimeout, after which the model is there again.
        """
        found = self.find(name, version)
        if found.workflow:
            raise Conflict(f"Model {name} is a node of workflow {found.workflow}. Unregister that: DELETE /workflows/{found.workflow}")
        if found.version == self.models[name].default and len(self.models[name].versions) > 1:
            raise CannotRemoveDefault(f"Cannot remove default version for model {name}")
        await self.withdraw(found)
        if name not in self.models:
            self.splits.forget(name)
        self._tell_managed()

    def has(self, version: ModelVersion) -> bool:
        """Whether requests find it."""
        model = self.models.get(version.name)
        return model is not None and model.versions.get(version.version) is version

    def is_taken(self, name: str, version: str) -> bool:
        """Also by one that is coming, or that is not closed yet."""
        return (name, version) in self._taken

    def add(self, version: ModelVersion, *, beside: bool = False) -> None:
        """`beside`: no request finds it, until `swap` gives it another's place."""
        self._taken.add((version.name, version.version))
        if beside:
            self._coming.add(version)
        else:
            self._put_in(version)

    def swap(self, old: ModelVersion, new: ModelVersion) -> None:
        """In one turn of the loop. The old one is there until it is discarded, though no request finds it."""
        new.replaced = old.version
        model = self.models[old.name]
        model.versions = {each.version: each for each in [new if version is old else version for version in model.versions.values()]}
        self._coming.discard(new)
        self._leaving.add(old)
        self.splits.replaced(model, old.version, new.version)
        new.watch(self._tell_readiness)
        self._tell_change()
        self.splits.came(new)
        self._tell_managed()

    async def withdraw(self, found: ModelVersion) -> None:
        """What `unregister` does, without its questions."""
        self._take_out(found)
        try:
            await asyncio.wait_for(found.finished(), self.settings.unregister_model_timeout)
        except BaseException as error:
            self._leaving.discard(found)
            self._put_in(found)
            if isinstance(error, TimeoutError | asyncio.TimeoutError):
                raise CleanupTimeout(f"Timed out while cleaning resources: {found.name}") from None
            raise
        await self.discard(found)

    async def discard(self, found: ModelVersion) -> None:
        """End it at once: what its workers hold is refused, what was downloaded for it goes.

        To the end, also where who asked for it leaves: half removed, a version would keep its name and its processes for good.
        """
        await self._background.to_the_end(self._discard(found))

    async def _discard(self, found: ModelVersion) -> None:
        await self._remove(found)
        self._downloads.remove(found)

    async def close(self, drain: float = 0.0) -> None:
        """End all workers; with `drain`, give accepted requests that many seconds first."""
        self._downloads.close()
        self.rollouts.close()
        self.shadows.close()
        versions = self._all()
        if drain:
            finished = [asyncio.ensure_future(version.finished()) for version in versions]
            if finished:
                _, late = await asyncio.wait(finished, timeout=drain)
                for task in late:
                    task.cancel()
        for version in versions:
            version.refuse_waiting(Unavailable("The server is stopping."))
        await asyncio.gather(*(self._remove(version) for version in versions))
        await self._background.over()
        await self.recorders.close()
        await asyncio.to_thread(self.rollouts.logs.close)
        await asyncio.to_thread(self.state.close)
        await asyncio.to_thread(self._environments.close)
        await asyncio.to_thread(self._starter.close)

    def workers(self) -> list[Worker]:
        """Of all versions that requests find."""
        return [worker for model in self.models.values() for version in model.versions.values() for worker in version.workers]

    def _all(self) -> list[ModelVersion]:
        return [*self._coming, *self._leaving, *(version for model in self.models.values() for version in model.versions.values())]

    def _choose_gpus(self, plan: Plan) -> tuple[int, ...]:
        """For one more worker: those with the fewest workers of all models."""
        used = Counter(gpu for version in self._all() for worker in version.workers for gpu in worker.gpus)
        return least_used(plan.gpus, used, plan.parallel.gpus)

    def _put_in(self, version: ModelVersion) -> None:
        if version.name not in self.models:
            self.splits.begin(version.name)
        model = self.models.setdefault(version.name, Model(version.name))
        model.versions[version.version] = version
        model.default = model.default or version.version
        version.watch(self._tell_readiness)
        self._tell_change()
        self.splits.came(version)

    def _tell_change(self) -> None:
        self.splits.refresh()
        for listener in self.on_change:
            listener()
        for listener in self.on_readiness:
            listener()

    def _tell_readiness(self) -> None:
        if self.splits.refresh():  # who is not ready gets nothing
            for listener in self.on_change:
                listener()
        for listener in self.on_readiness:
            listener()

    def _tell_managed(self) -> None:
        for listener in self.on_managed:
            listener()

    def _take_out(self, version: ModelVersion) -> None:
        """No request finds it any more. Its name stays taken until it is closed."""
        self._leaving.add(version)
        model = self.models[version.name]
        del model.versions[version.version]
        if not model.versions:
            del self.models[version.name]
        elif model.default == version.version:
            model.default = next(iter(model.versions))
        self._tell_change()
        self.splits.went(version)

    async def _remove(self, version: ModelVersion) -> None:
        if self.has(version):
            self._take_out(version)
        await version.close()
        self._leaving.discard(version)
        self._coming.discard(version)
        if not any((other.name, other.version) == (version.name, version.version) for other in self._all()):
            self._taken.discard((version.name, version.version))
