"""The versions of this server: registered ones, loading replacements, and versions that end."""

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

    Each change is one turn of the event loop. It ends with the ready versions reported to the
    traffic manager.
    """

    def __init__(
        self, settings: Settings, state: StateStore, downloads: Downloads, background: TaskGroup
    ) -> None:
        self.models: dict[str, Model] = {}
        # Called when a name or a version may refer to another model than before.
        self.on_change: list[Callable[[], None]] = []
        # Called when a client has changed the models or their configuration.
        self.on_managed: list[Callable[[], None]] = []
        # Called when a version may have become ready or ceased to be.
        self.on_readiness: list[Callable[[], None]] = []
        configured = {
            name: model_settings.traffic
            for name, model_settings in settings.models.items()
            if model_settings.traffic is not None
        }
        self.traffic = TrafficManager(
            self.models, configured, state, self._notify_change, self.notify_managed
        )
        self.timeout = settings.unregister_model_timeout  # seconds for answering accepted requests
        self._downloads = downloads
        self._background = background
        self._taken: set[tuple[str, str]] = set()
        # Replacements that are loading, and not in `models` yet.
        self._coming: set[ModelVersion] = set()
        self._leaving: set[ModelVersion] = set()  # out of `models`, but with requests to answer

    def all(self) -> list[ModelVersion]:
        """Return all versions, including those that no request reaches."""
        return [
            *self._coming,
            *self._leaving,
            *(version for model in self.models.values() for version in model.versions.values()),
        ]

    def has(self, version: ModelVersion) -> bool:
        """Tell whether requests reach a version."""
        model = self.models.get(version.name)
        return model is not None and model.versions.get(version.version) is version

    def is_taken(self, name: str, version: str) -> bool:
        """Tell whether a version has this name, including versions that are loading or ending."""
        return (name, version) in self._taken

    def add(self, version: ModelVersion, *, beside: bool = False) -> None:
        """Add a version; with `beside`, no request reaches it until `swap`."""
        self._taken.add((version.name, version.version))
        if beside:
            self._coming.add(version)
        else:
            self._insert(version)

    def swap(self, old: ModelVersion, new: ModelVersion) -> None:
        """Put a version in the place of another, which exists until it is discarded."""
        new.replaced = old.version
        model = self.models[old.name]
        model.versions = {
            version.version: version
            for version in [
                new if present is old else present for present in model.versions.values()
            ]
        }
        self._coming.discard(new)
        self._leaving.add(old)
        self.traffic.on_version_replaced(model, old.version, new.version)
        new.watch(self.notify_readiness)
        self._notify_change()
        self.traffic.on_version_added(new)
        self.notify_managed()

    async def withdraw(self, version: ModelVersion) -> None:
        """Remove a version after its accepted requests are answered; no new one reaches it.

        Raises:
            CleanupTimeout: The requests took too long; the version is in place again.
        """
        # TorchServe does the same. The next call removes the version, which then has no worker.
        if not self.timeout and version.workers:
            self._background.load(version.scale(0, 0))
            raise CleanupTimeout(f"Timed out while cleaning resources: {version.name}")
        self._take_out(version)
        try:
            await asyncio.wait_for(version.wait_answered(), self.timeout or None)
        except BaseException as error:
            self._leaving.discard(version)
            self._insert(version)
            if isinstance(error, TimeoutError | asyncio.TimeoutError):
                raise CleanupTimeout(
                    f"Timed out while cleaning resources: {version.name}"
                ) from None
            raise
        await self.discard(version)

    async def discard(self, version: ModelVersion) -> None:
        """End a version at once: its waiting requests are refused, its download is removed.

        This goes on if the caller is cancelled. A half removed version would keep its name and its
        processes for ever.
        """
        await self._background.run_shielded(self._discard(version))

    async def close(self, drain: float) -> None:
        """End all versions; with `drain`, give accepted requests so many seconds first."""
        versions = self.all()
        if drain:
            finished = [asyncio.ensure_future(version.wait_answered()) for version in versions]
            if finished:
                _, late = await asyncio.wait(finished, timeout=drain)
                for task in late:
                    task.cancel()
        for version in versions:
            version.refuse_waiting(Unavailable("The server is stopping."))
        await asyncio.gather(*(self._remove(version) for version in versions))

    def notify_readiness(self) -> None:
        if self.traffic.refresh():  # A version that is not ready gets no requests.
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

    def _take_out(self, version: ModelVersion) -> None:
        """Remove a version from `models`; its name stays taken until it is closed."""
        self._leaving.add(version)
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
        if self.has(version):
            self._take_out(version)
        await version.close()
        self._leaving.discard(version)
        self._coming.discard(version)
        if not any(
            (known.name, known.version) == (version.name, version.version) for known in self.all()
        ):
            self._taken.discard((version.name, version.version))
