"""All versions of this server: registered, loading as a replacement, or ending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.core.models.model import Model, ModelVersion
from tsx_runtime.core.persistence import StateStore
from tsx_runtime.core.registry.downloads import Downloads
from tsx_runtime.core.traffic.manager import TrafficManager
from tsx_runtime.errors import CleanupTimeout, Unavailable
from tsx_runtime.settings.schema import Settings


class ModelTable:
    """All versions by name.

    Each change is made without an `await`. At its end, the traffic manager learns which versions
    are ready.
    """

    def __init__(
        self, settings: Settings, state: StateStore, downloads: Downloads, background: TaskGroup
    ) -> None:
        self.models: dict[str, Model] = {}
        # Called when a name or a version may refer to another model than before.
        self.on_change: list[Callable[[], None]] = []
        # Called when a client has changed the models or their configuration.
        self.on_managed: list[Callable[[], None]] = []
        # Called when a version may have become ready, or not ready.
        self.on_readiness: list[Callable[[], None]] = []
        configured = {
            name: model_settings.traffic
            for name, model_settings in settings.models.items()
            if model_settings.traffic is not None
        }
        self.traffic = TrafficManager(
            self.models, configured, state, self._notify_change, self.notify_managed
        )
        # Seconds in which accepted requests are answered.
        self.timeout = settings.unregister_model_timeout
        self._downloads = downloads
        self._background = background
        self._taken_names: set[tuple[str, str]] = set()
        # Replacements that are loading; they are not in `models` yet.
        self._loading_replacements: set[ModelVersion] = set()
        # Versions that were removed from `models`, but still answer requests.
        self._ending_versions: set[ModelVersion] = set()

    def all(self) -> list[ModelVersion]:
        """Return all versions, including those that get no requests."""
        return [
            *self._loading_replacements,
            *self._ending_versions,
            *(version for model in self.models.values() for version in model.versions.values()),
        ]

    def is_registered(self, version: ModelVersion) -> bool:
        """Tell whether a version is registered, so that it gets requests."""
        model = self.models.get(version.name)
        return model is not None and model.versions.get(version.version) is version

    def is_taken(self, name: str, version: str) -> bool:
        """Tell whether a version has this name and number, including ones that load or end."""
        return (name, version) in self._taken_names

    def add(self, version: ModelVersion, *, is_replacement: bool = False) -> None:
        """Add a version; a replacement gets no requests until `swap`."""
        self._taken_names.add((version.name, version.version))
        if is_replacement:
            self._loading_replacements.add(version)
        else:
            self._insert(version)

    def swap(self, old: ModelVersion, new: ModelVersion) -> None:
        """Register a version in place of another one, which exists until it is discarded."""
        new.replaced_version = old.version
        model = self.models[old.name]
        model.versions = {
            version.version: version
            for version in [
                new if version is old else version for version in model.versions.values()
            ]
        }
        self._loading_replacements.discard(new)
        self._ending_versions.add(old)
        self.traffic.on_version_replaced(model, old.version, new.version)
        new.watch(self.notify_readiness)
        self._notify_change()
        self.traffic.on_version_added(new)
        self.notify_managed()

    async def withdraw(self, version: ModelVersion) -> None:
        """Stop requests to a version, and remove it once its accepted requests are answered.

        Raises:
            CleanupTimeout: The requests took too long; the version is registered again.
        """
        # TorchServe does the same: a timeout of 0 ends the workers and fails. The next call removes
        # the version, since it has no workers then.
        if not self.timeout and version.workers:
            self._background.load(version.scale(0, 0))
            raise CleanupTimeout(f"Timed out while cleaning resources: {version.name}")
        self._remove_from_models(version)
        try:
            await asyncio.wait_for(version.dispatcher.wait_idle(), self.timeout or None)
        except BaseException as error:
            self._ending_versions.discard(version)
            self._insert(version)
            if isinstance(error, TimeoutError | asyncio.TimeoutError):
                raise CleanupTimeout(
                    f"Timed out while cleaning resources: {version.name}"
                ) from None
            raise
        await self.discard(version)

    async def discard(self, version: ModelVersion) -> None:
        """End a version at once: its waiting requests are refused, its download is removed.

        This continues if the caller is cancelled, since a half-removed version would keep its name
        and its processes forever.
        """
        await self._background.run_shielded(self._discard(version))

    async def close(self, drain: float) -> None:
        """End all versions, after accepted requests had up to `drain` seconds."""
        versions = self.all()
        if drain:
            drain_tasks = [
                asyncio.ensure_future(version.dispatcher.wait_idle()) for version in versions
            ]
            if drain_tasks:
                _, pending_tasks = await asyncio.wait(drain_tasks, timeout=drain)
                for task in pending_tasks:
                    task.cancel()
        for version in versions:
            version.dispatcher.refuse_waiting(Unavailable("The server is stopping."))
        await asyncio.gather(*(self._remove(version) for version in versions))

    def notify_readiness(self) -> None:
        if self.traffic.refresh():  # Only versions that are ready get requests.
            for listener in self.on_change:
                listener()
        for listener in self.on_readiness:
            listener()

    def notify_managed(self) -> None:
        for listener in self.on_managed:
            listener()

    def _notify_change(self) -> None:
        self.traffic.refresh()
        for listener in [*self.on_change, *self.on_readiness]:
            listener()

    def _insert(self, version: ModelVersion) -> None:
        if version.name not in self.models:
            self.traffic.load_settings(version.name)
        model = self.models.setdefault(version.name, Model(version.name))
        model.versions[version.version] = version
        model.default = model.default or version.version
        version.watch(self.notify_readiness)
        self._notify_change()
        self.traffic.on_version_added(version)

    def _remove_from_models(self, version: ModelVersion) -> None:
        """Remove a version from `models`; its name stays taken until the version is closed."""
        self._ending_versions.add(version)
        model = self.models[version.name]
        del model.versions[version.version]
        if not model.versions:
            del self.models[version.name]
        elif model.default == version.version:
            model.default = next(iter(model.versions))
        self._notify_change()
        self.traffic.on_version_removed(version)

    async def _discard(self, version: ModelVersion) -> None:
        await self._remove(version)
        self._downloads.remove(version)

    async def _remove(self, version: ModelVersion) -> None:
        if self.is_registered(version):
            self._remove_from_models(version)
        await version.close()
        self._ending_versions.discard(version)
        self._loading_replacements.discard(version)
        if not any(
            (remaining.name, remaining.version) == (version.name, version.version)
            for remaining in self.all()
        ):
            self._taken_names.discard((version.name, version.version))
