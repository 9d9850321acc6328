"""The versions of this server: registered ones, loading replacements, and those being removed."""

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
    """Each change is one turn of the event loop, after which the traffic manager has the versions
    that are ready.
    """

    def __init__(
        self, settings: Settings, state: StateStore, downloads: Downloads, background: TaskGroup
    ) -> None:
        self.models: dict[str, Model] = {}
        self.on_change: list[
            Callable[[], None]
        ] = []  # called when a name or a version may mean another model than before
        self.on_managed: list[
            Callable[[], None]
        ] = []  # called when what is served, or with what, was changed on request
        self.on_readiness: list[
            Callable[[], None]
        ] = []  # called when a version may have become ready, or not ready any more
        configured = {
            name: own.traffic for name, own in settings.models.items() if own.traffic is not None
        }
        self.traffic = TrafficManager(
            self.models, configured, state, self._tell_change, self.tell_managed
        )
        self.timeout = (
            settings.unregister_model_timeout
        )  # seconds in which accepted requests are answered
        self._downloads = downloads
        self._background = background
        self._taken: set[tuple[str, str]] = set()
        self._coming: set[ModelVersion] = (
            set()
        )  # not in `models` yet: each takes another's place once it has loaded
        self._leaving: set[ModelVersion] = set()  # out of `models`, but with requests to answer

    def all(self) -> list[ModelVersion]:
        """Also those that no request finds."""
        return [
            *self._coming,
            *self._leaving,
            *(version for model in self.models.values() for version in model.versions.values()),
        ]

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
        """The old one is there until it is discarded, though no request finds it."""
        new.replaced = old.version
        model = self.models[old.name]
        model.versions = {
            each.version: each
            for each in [new if version is old else version for version in model.versions.values()]
        }
        self._coming.discard(new)
        self._leaving.add(old)
        self.traffic.on_version_replaced(model, old.version, new.version)
        new.watch(self.tell_readiness)
        self._tell_change()
        self.traffic.on_version_added(new)
        self.tell_managed()

    async def withdraw(self, found: ModelVersion) -> None:
        """No new request finds it; what is accepted is answered first.

        Raises CleanupTimeout, after which it is there again.
        """
        if (
            not self.timeout and found.workers
        ):  # as in TorchServe; the next call removes the version, which then has none
            self._background.load(found.scale(0, 0))
            raise CleanupTimeout(f"Timed out while cleaning resources: {found.name}")
        self._take_out(found)
        try:
            await asyncio.wait_for(found.finished(), self.timeout or None)
        except BaseException as error:
            self._leaving.discard(found)
            self._put_in(found)
            if isinstance(error, TimeoutError | asyncio.TimeoutError):
                raise CleanupTimeout(f"Timed out while cleaning resources: {found.name}") from None
            raise
        await self.discard(found)

    async def discard(self, found: ModelVersion) -> None:
        """End it at once: what its workers hold is refused, what was downloaded for it goes.

        To the end, also where the caller is cancelled: half removed, a version would keep its name
        and its processes for good.
        """
        await self._background.to_the_end(self._discard(found))

    async def close(self, drain: float) -> None:
        """End all versions; with `drain`, give accepted requests that many seconds first."""
        versions = self.all()
        if drain:
            finished = [asyncio.ensure_future(version.finished()) for version in versions]
            if finished:
                _, late = await asyncio.wait(finished, timeout=drain)
                for task in late:
                    task.cancel()
        for version in versions:
            version.refuse_waiting(Unavailable("The server is stopping."))
        await asyncio.gather(*(self._remove(version) for version in versions))

    def tell_readiness(self) -> None:
        if self.traffic.refresh():  # a version that is not ready gets no requests
            for listener in self.on_change:
                listener()
        for listener in self.on_readiness:
            listener()

    def tell_managed(self) -> None:
        for listener in self.on_managed:
            listener()

    def _tell_change(self) -> None:
        self.traffic.refresh()
        for listener in [*self.on_change, *self.on_readiness]:
            listener()

    def _put_in(self, version: ModelVersion) -> None:
        if version.name not in self.models:
            self.traffic.load_settings(version.name)
        model = self.models.setdefault(version.name, Model(version.name))
        model.versions[version.version] = version
        model.default = model.default or version.version
        version.watch(self.tell_readiness)
        self._tell_change()
        self.traffic.on_version_added(version)

    def _take_out(self, version: ModelVersion) -> None:
        """Its name stays taken until it is closed."""
        self._leaving.add(version)
        model = self.models[version.name]
        del model.versions[version.version]
        if not model.versions:
            del self.models[version.name]
        elif model.default == version.version:
            model.default = next(iter(model.versions))
        self._tell_change()
        self.traffic.on_version_removed(version)

    async def _discard(self, found: ModelVersion) -> None:
        await self._remove(found)
        self._downloads.remove(found)

    async def _remove(self, version: ModelVersion) -> None:
        if self.has(version):
            self._take_out(version)
        await version.close()
        self._leaving.discard(version)
        self._coming.discard(version)
        if not any(
            (other.name, other.version) == (version.name, version.version) for other in self.all()
        ):
            self._taken.discard((version.name, version.version))
