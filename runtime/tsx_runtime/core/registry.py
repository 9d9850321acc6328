"""The models: register, find, scale, set default, unregister."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsx_archiver import ArchiveError, ArchiveNotFound, OpenArchive, is_model_name, open_archive
from tsx_runtime.core.devices import gpu_count, least_used
from tsx_runtime.core.downloads import Downloads
from tsx_runtime.core.environments import Environment, Environments
from tsx_runtime.core.model import NOTHING_OWN, Host, Model, ModelVersion, Plan, RegisterOrder, plan, with_own_settings
from tsx_runtime.core.peek import holds_exported_program
from tsx_runtime.core.places import machine
from tsx_runtime.core.processes import ProcessStarter
from tsx_runtime.core.recorders import Recorders
from tsx_runtime.core.replacing import Handover, Said, catch_up, in_place_of
from tsx_runtime.core.rollouts import Rollouts
from tsx_runtime.core.shadows import Shadows
from tsx_runtime.core.splits import Splits
from tsx_runtime.core.state import State, state_directory
from tsx_runtime.core.tracing import Tracer
from tsx_runtime.errors import (
    BadRequest,
    CannotRemoveDefault,
    CleanupTimeout,
    Conflict,
    LoadFailed,
    ModelNotFound,
    Unavailable,
)
from tsx_runtime.nearest import suggestion
from tsx_runtime.plugins import load_plugins
from tsx_runtime.settings import Settings
from tsx_runtime.sources import Trust, in_store, is_url

PATHS = frozenset({"labels", "record", "rollback", "rollout", "shadow", "traffic"})  # below /models/NAME/, where versions are
FIRST_WORKER_ID = 9000  # TorchServe's first worker port; here it is only a number

logger = logging.getLogger("tsx.registry")


class Registry:
    """All models of this server. Not thread safe: it lives on the event loop."""

    def __init__(self, settings: Settings, worker_files: int | None = None, worker_output: str = "") -> None:
        """`worker_files`: how many files a worker may have open; as many as this process if not set. `worker_output`: see `LoadOrder`."""
        self.settings = settings
        self.models: dict[str, Model] = {}
        self.state = State(state_directory(settings))
        configured = {name: own.traffic for name, own in settings.models.items() if own.traffic is not None}
        self.splits = splits = Splits(self.models, configured, self.state, self._tell_change)
        self.find, self.route = splits.find, splits.route
        self.traffic, self.set_traffic, self.shares, self.rollback = splits.traffic, splits.set_traffic, splits.shares, splits.rollback
        self.observe, self.unobserve, self.on_traffic = splits.observe, splits.unobserve, splits.on_traffic
        self.rollouts = Rollouts(self)
        self.recorders = Recorders(self)
        self.tracer: Tracer | None = None  # set before anything is served, where requests are traced
        self.stopping = False  # a stop was asked for: no balancer should send anything more
        self.on_change: list[Callable[[], None]] = []  # called when a name or a version may mean another model than before
        self.on_managed: list[Callable[[], None]] = []  # called when what is served, or with what, was changed on request
        self.on_readiness: list[Callable[[], None]] = []  # called when a version may have become ready, or not ready any more
        self.gpus = gpu_count() if settings.number_of_gpu is None else min(settings.number_of_gpu, gpu_count())
        self._starter = ProcessStarter(preload=settings.worker_preload, worker_files=worker_files, hide=settings.blacklist_env_vars)
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
        self._replacing: set[str] = set()  # models of which a version is being replaced
        self._leaving: set[ModelVersion] = set()  # out of `models`, but with requests to answer
        self.plugins = load_plugins(settings.plugins)
        self.shadows = Shadows(self.models, splits, self.plugins.comparisons)
        self._downloads = Downloads(settings, self.plugins.sources)
        self._background: set[asyncio.Task[None]] = set()

    def warm_up(self, paths: Iterable[Path] = ()) -> None:
        """Have the process that workers come from import torch, and what `paths` will need, while the rest of the server starts."""
        self._starter.warm_up(exported=any(map(holds_exported_program, paths)))

    def stop(self) -> None:
        """Be ready no more; what is asked for is still done."""
        self.stopping = True
        self._tell_readiness()

    # Registering

    async def register(self, order: RegisterOrder, *, wait: bool = True, trust: Trust = Trust.CLIENT) -> ModelVersion:
        """Register from the model store, or from a URL by way of it. With `wait`, its workers are ready on return, or it is not registered.

        Raises ModelNotFound, BadRequest (the archive cannot be used), Conflict, LoadFailed, DownloadFailed, ModelFileExists.
        """
        version = await self._register(order, wait, trust)
        self._tell_managed()
        return version

    async def _register(self, order: RegisterOrder, wait: bool, trust: Trust) -> ModelVersion:
        if not is_url(order.url):
            return await self.register_path(self._in_store(order.url), order, wait=wait)
        local = await self._downloads.local_file(order, trust)
        if local is not None:
            return await self.register_path(local, order, wait=wait)
        downloaded = await self._downloads.fetch(order, trust)
        try:
            version = await self.register_path(downloaded, order, wait=wait)
        except BaseException:
            downloaded.unlink(missing_ok=True)
            raise
        self._downloads.belongs(version, downloaded)
        return version

    async def register_path(self, path: Path, order: RegisterOrder, *, wait: bool = True) -> ModelVersion:
        """Register an archive or directory that lies anywhere: what the command line names itself."""
        try:
            archive = await asyncio.to_thread(open_archive, path, cache=self.settings.cache_dir, limits=self.settings.archive_limits())
        except ArchiveNotFound as error:
            raise ModelNotFound(f"Model not found at: {order.url}. {error}") from error
        except ArchiveError as error:
            raise BadRequest(str(error)) from error
        return await self.register_archive(archive, order, wait=wait)

    async def register_archive(self, archive: OpenArchive, order: RegisterOrder, *, wait: bool = True) -> ModelVersion:
        """Register what is open already; it is closed where that fails, and with the model."""
        environment, old = None, None
        try:
            old = self._begin_replacing(archive, order)
            self._check_name(archive, order, old)  # before minutes are spent on its packages
            environment = await self._environment(archive, order)
            version = self._add(archive, order, environment, old)
        except BaseException:
            archive.close()
            if environment is not None:
                environment.close()
            if old is not None:
                self._replacing.discard(old.name)
            raise
        for problem in archive.problems:
            logger.warning("%s: %s", order.url, problem)
        starting = version.scale(version.min_workers, version.max_workers)
        if old is not None:
            starting = self._take_over(old, version, starting)
        if not wait:
            self._in_background(starting)
            return version
        try:
            await starting
        except BaseException:  # also where its client has left
            await self._to_the_end(self._remove(version))
            raise
        return version

    def _begin_replacing(self, archive: OpenArchive, order: RegisterOrder) -> ModelVersion | None:
        """The version whose place it is to take: that of its number, else the default one. Raises Conflict."""
        name, number = order.model_name or archive.manifest.model_name, order.version or archive.manifest.version
        model = self.models.get(name)
        if not order.replaces or model is None:
            return None
        if name in self._replacing:
            raise Conflict(f"A version of model {name} is being replaced already. Try again when that is done.")
        old = model.versions.get(number) or model.versions[model.default]
        if old.workflow:
            raise Conflict(f"Model {name} is a node of workflow {old.workflow}, and comes and goes with that.")
        self._replacing.add(name)
        return old

    async def _take_over(self, old: ModelVersion, new: ModelVersion, starting: Coroutine[Any, Any, None]) -> None:
        """Where this fails, the old one goes on as if nothing was."""
        before = Said.of(old)
        try:
            await starting
            self._swap(old, new, before)
        except BaseException as error:
            if isinstance(error, LoadFailed | Conflict):
                why = f"version {new.version} of {new.url} has not taken its place: {error.message}"
                old.note_error(why + (f"\n\n{error.traceback}" if isinstance(error, LoadFailed) and error.traceback else ""))
                logger.error("%s goes on: %s", old.label, why)
            await self.discard(new)
            raise
        finally:
            self._replacing.discard(old.name)

    def _swap(self, old: ModelVersion, new: ModelVersion, before: Said) -> None:
        """In one turn of the loop: no request sees anything between the two. Raises Conflict."""
        model = self.models.get(old.name)
        if model is None or model.versions.get(old.version) is not old:
            raise Conflict(f"Version {old.version} of model {old.name} was unregistered while its replacement was loaded.")
        if scaling := catch_up(old, new, before):
            self._in_background(scaling)
        new.replaced = old.version
        model.versions = {each.version: each for each in [new if version is old else version for version in model.versions.values()]}
        self._coming.discard(new)
        self._leaving.add(old)
        self.splits.replaced(model, old.version, new.version)
        new.watch(self._tell_readiness)
        handover = Handover(old, new)
        self._tell_change()
        self.splits.came(new)
        self._tell_managed()
        logger.info("%s: takes the place of version %s", new.label, old.version)
        self._begin(self._drain(old, handover))

    async def _drain(self, old: ModelVersion, handover: Handover) -> None:
        """Until nobody has anything there any more, or for `unregister_model_timeout`."""
        try:
            await asyncio.wait_for(old.over(), self.settings.unregister_model_timeout)
        except (TimeoutError, asyncio.TimeoutError):
            text = "%s: was replaced, and is ended with what it still has: that took longer than unregister_model_timeout"
            logger.warning(text, old.label)
        await self._discard(old)
        handover.end()

    async def _environment(self, archive: OpenArchive, order: RegisterOrder) -> Environment | None:
        """What the archive needs beside the server's own packages. Raises InvalidModel."""
        requirements = archive.manifest.requirements_file
        if requirements and not self.settings.install_py_dep_per_model:
            text = "%s: the packages of %s are not installed, since install_py_dep_per_model is false"
            logger.warning(text, order.url, requirements)
            requirements = None
        if not requirements and not archive.config.use_venv:
            return None
        return await self._environments.open(order.model_name or archive.manifest.model_name, archive.directory, requirements)

    def _check_name(self, archive: OpenArchive, order: RegisterOrder, old: ModelVersion | None) -> tuple[str, str]:
        name = order.model_name or archive.manifest.model_name
        number = order.version or archive.manifest.version
        for what, value in (("model name", name), ("version", number)):
            if not is_model_name(value):
                raise BadRequest(f"The {what} {value!r} cannot be used: letters, digits, '_', '-' and '.' only, a letter or digit first.")
        if number in PATHS:
            raise BadRequest(f"The version {number!r} cannot be used: it stands for something else in the paths of the management API.")
        if (name, number) in self._taken and (old is None or old.version != number):
            raise Conflict(f"Model version {number} is already registered for model {name}")
        return name, number

    def _add(self, archive: OpenArchive, order: RegisterOrder, environment: Environment | None, old: ModelVersion | None) -> ModelVersion:
        name, number = self._check_name(archive, order, old)
        if old is not None:
            order = in_place_of(old, order, archive.config)
        order = with_own_settings(order, self.settings.models.get(name))
        own = self.settings.model_versions.get(name, {}).get(number, NOTHING_OWN)
        chosen = self._with_policy(plan(order, archive.config, self.settings, self.gpus, own), name, archive.config.batch_policy)
        version = ModelVersion(name, number, archive, order, chosen, self._host, environment)
        self._taken.add((name, number))
        if old is None:
            self._put_in(version)
        else:
            self._coming.add(version)
        return version

    def _with_policy(self, chosen: Plan, model: str, wanted: str | None) -> Plan:
        """With the plugin that its model-config.yaml names as the batch policy."""
        if wanted is None or wanted == "wait":
            return chosen
        policy = self.plugins.batch_policies.get(wanted)
        if policy is None:
            hint = suggestion(wanted, ["wait", *self.plugins.batch_policies])
            logger.warning("%s: batchPolicy %r is neither 'wait' nor a plugin that is loaded%s; it is served without", model, wanted, hint)
            return chosen
        return replace(chosen, wait=True, policy=policy)

    def _in_store(self, url: str) -> Path:
        if not url:
            raise BadRequest("Parameter url is required.")
        absent = f"Model not found: {url}. This server has no model store; start it with --model-store DIRECTORY"
        return in_store(url, self.settings.model_store, absent)

    # Changing

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
            self._in_background(scaling)
        self._tell_managed()

    def change(self, name: str, version: str | None, changes: Mapping[str, int]) -> ModelVersion:
        """Values for names of TUNABLE. Raises ModelNotFound, ModelVersionNotFound."""
        found = self.find(name, version)
        found.change(changes)
        self._tell_managed()
        return found

    def set_default(self, name: str, version: str) -> None:
        self.splits.set_default(name, version)
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
        """End it at once: what its workers hold is refused, what was downloaded for it goes."""
        await self._to_the_end(self._discard(found))

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
        if self._background:
            await asyncio.wait(self._background)
        await self.recorders.close()
        await asyncio.to_thread(self.state.close)
        await asyncio.to_thread(self._environments.close)
        await asyncio.to_thread(self._starter.close)

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
        model = self.models.get(version.name)
        if model is not None and model.versions.get(version.version) is version:
            self._take_out(version)
        await version.close()
        self._leaving.discard(version)
        self._coming.discard(version)
        if not any((other.name, other.version) == (version.name, version.version) for other in self._all()):
            self._taken.discard((version.name, version.version))

    async def _to_the_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Also where who asked for it leaves meanwhile: half removed, a version would keep its name and its processes for good."""
        await asyncio.shield(self._begin(work))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """A failure is already logged and in the model's description."""
        self._begin(_swallow_failure(work))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def _swallow_failure(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except (LoadFailed, Conflict):
        return
