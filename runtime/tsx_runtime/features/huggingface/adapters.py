"""LoRA adapters that are added to a model while it is served.

The server checks a copy of an adapter before a worker reads it. Workers that start later, also of
the next server, load the same copy.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.huggingface import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    GENERATION,
    MANIFEST_KEY,
    read_adapter,
)
from tsx_archiver.storage.private_directory import private_directory
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.channel import Channel
from tsx_runtime.errors import BadRequest, ModelNotFound
from tsx_runtime.features.huggingface.hub import check_allowed, download, parse_hub
from tsx_runtime.features.huggingface.lora import check_lora
from tsx_runtime.sources import Fetcher, Trust, in_store, is_hub, is_url
from tsx_runtime.sources.fetch import copy_file

FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
PART = "adapters"  # of a model's saved state: version -> name -> {"source", "directory"}
IN_PLACE = "If you want to load the adapter in place, set 'load_inplace' to True."

logger = logging.getLogger("tsx.registry")


class Adapters:
    """The adapters that were added to the models of a server."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # Workers of a version change one after the other, so that they agree.
        self._locks: defaultdict[ModelVersion, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._served: WeakSet[ModelVersion] = WeakSet()

    def find(self, model: str | None) -> ModelVersion:
        """Return the version that `NAME[:VERSION]` means, or else the only one to choose.

        Raises:
            BadRequest: The version takes no adapters, or several do and none is named.
            ModelNotFound: There is no such model.
        """
        if model is None:
            names = [
                name for name in self._registry.models if _generates(self._registry.find(name))
            ]
            if len(names) != 1:
                raise BadRequest(
                    f"The field 'model' must name the model: {', '.join(sorted(names)) or 'none'}"
                    " generate text."
                )
            model = names[0]
        name, _, number = model.partition(":")
        version = self._registry.find(name, number or None)
        if not _generates(version):
            raise BadRequest(f"Model {name} takes no adapters, because it generates no text.")
        return version

    async def add(self, version: ModelVersion, name: str, source: str, *, in_place: bool) -> None:
        """Add an adapter to all workers of a version.

        Args:
            version: The version.
            name: The name of the adapter.
            source: A directory of the model store, or a URL that `allowed_urls` allows.
            in_place: Whether an added adapter of this name is replaced.

        Raises:
            BadRequest: The adapter cannot be used. The workers have the same ones as before.
            ModelNotFound: There is no such adapter.
            DownloadFailed: The download failed.
        """
        self._check_name(version, name, in_place)
        root = self.directory(version)
        private_directory(root)
        directory = Path(tempfile.mkdtemp(dir=root))
        remove = partial(shutil.rmtree, directory, ignore_errors=True)
        try:
            fetch = partial(self._fetch, name, source, directory)
            await self._registry.downloads.call(fetch, lambda _: remove())
            async with self._locks[version]:
                self._check_name(version, name, in_place)
                self._registry.find(version.name, version.version)  # It may be unregistered now.
                old = version.added_adapters.get(name)
                await self._set(version, name, str(directory), old["directory"] if old else None)
                version.added_adapters[name] = {"source": source, "directory": str(directory)}
                self._save(version)
        except BaseException:
            remove()
            raise
        if old is not None:
            shutil.rmtree(old["directory"], ignore_errors=True)
        await self._registry.state.written()

    async def remove(self, version: ModelVersion, name: str) -> None:
        """Remove an adapter from all workers of a version; its sequences end first.

        Raises:
            ModelNotFound: No adapter of this name was added.
        """
        async with self._locks[version]:
            adapter = version.added_adapters.pop(name, None)
            if adapter is None:
                raise ModelNotFound(f"The lora adapter '{name}' cannot be found.")
            self._save(version)
            await asyncio.gather(*(channel.set_adapter(name, None) for channel in _loaded(version)))
        shutil.rmtree(adapter["directory"], ignore_errors=True)
        await self._registry.state.written()

    async def load_into(self, version: ModelVersion, channel: Channel) -> None:
        """Add the adapters to a worker that has loaded the model."""
        self._served.add(version)
        async with self._locks[version]:
            for name, adapter in version.added_adapters.items():
                if error := await channel.set_adapter(name, adapter["directory"]):
                    text = f"A worker serves without the adapter {name}: {error}"
                    logger.error("%s: %s", version.label, text)
                    version.stats.error_log.add_error(text, "")

    def restore(self, version: ModelVersion) -> None:
        """Set the adapters of a new version that the saved state has."""
        # A copy, since the state is only written when it differs from what it has.
        version.added_adapters = dict(self._saved(version.name).get(version.version, {}))

    def forget(self, version: ModelVersion) -> None:
        """Remove the adapters of a version that was served, unless the server ends."""
        self._locks.pop(version, None)
        model = self._registry.models.get(version.name)
        is_replaced = model is not None and version.version in model.versions
        is_ending = is_replaced or self._registry.downloads.closed.is_set()
        if version.added_adapters and version in self._served and not is_ending:
            version.added_adapters = {}
            self._save(version)
            shutil.rmtree(self.directory(version), ignore_errors=True)

    def directory(self, version: ModelVersion) -> Path:
        """Return the directory for the copies of a version's adapters.

        Raises:
            BadRequest: The server has no directory for its state.
        """
        if self._registry.state.directory is None:
            raise BadRequest("Adapters are kept in state_dir. Set it to a directory of its own.")
        return self._registry.state.directory / PART / version.name / version.version

    def _check_name(self, version: ModelVersion, name: str, in_place: bool) -> None:
        if name in packed_adapters(version):
            raise BadRequest(f"The lora adapter '{name}' is a part of the model's archive.")
        if name in version.added_adapters and not in_place:
            raise BadRequest(f"The lora adapter '{name}' has already been loaded. {IN_PLACE}")

    def _fetch(self, name: str, source: str, directory: Path) -> None:
        """Copy or download an adapter into a directory, and check it; this blocks."""
        settings = self._registry.settings
        origin = directory
        if is_hub(source):
            model = parse_hub(source)
            check_allowed(model, settings.allowed_urls)
            closed = self._registry.downloads.closed
            origin = download(
                model,
                max_bytes=settings.max_archive_size,
                progress=lambda done, total: None,
                stopped=closed.is_set,
            )
        elif is_url(source):
            fetcher = Fetcher(settings, directory, FILES, self._registry.plugins.sources)
            for file in FILES:
                fetcher.fetch(f"{source.rstrip('/')}/{file}", Trust.CLIENT)
        else:
            origin = in_store(source, settings.model_store, "No adapter found for")
        for file in FILES:
            if not (origin / file).is_file():
                raise ModelNotFound(
                    f"No adapter found for {source}: it has no {file}. Only directories that PEFT's"
                    " save_pretrained has written, with safetensors, are loaded."
                )
            if origin != directory:
                copy_file(origin / file, directory / file, settings.max_archive_size)
        try:
            read_adapter(name, directory)
            check_lora(directory)
        except CannotPack as error:
            text = error.message.replace(str(directory), source)
            raise BadRequest(f"The adapter {name} cannot be loaded: {text}") from error

    async def _set(
        self, version: ModelVersion, name: str, directory: str, previous: str | None
    ) -> None:
        """Set an adapter in all workers; if one refuses, the others get the previous one again."""
        channels = _loaded(version)
        errors = await asyncio.gather(
            *(channel.set_adapter(name, directory) for channel in channels)
        )
        if any(errors):
            pairs = zip(channels, errors, strict=True)
            await asyncio.gather(
                *(channel.set_adapter(name, previous) for channel, error in pairs if error is None)
            )
            raise BadRequest(next(filter(None, errors)))

    def _saved(self, name: str) -> dict[str, Any]:
        return dict(self._registry.state.load(name).get(PART, {}))

    def _save(self, version: ModelVersion) -> None:
        saved = self._saved(version.name) | {version.version: dict(version.added_adapters)}
        parts = {number: adapters for number, adapters in saved.items() if adapters}
        self._registry.state.save(version.name, **{PART: parts or None})


def packed_adapters(version: ModelVersion) -> list[Any]:
    """Return the names of the adapters in a version's archive."""
    names = _entry(version).get("adapters")
    return names if isinstance(names, list) else []


def _generates(version: ModelVersion) -> bool:
    return bool(_entry(version).get("task") == GENERATION)


def _entry(version: ModelVersion) -> dict[str, Any]:
    """Return the archive's entry about the model, which may be anything."""
    entry = version.manifest.get(MANIFEST_KEY)
    return entry if isinstance(entry, dict) else {}


def _loaded(version: ModelVersion) -> list[Channel]:
    """Return the channels of all processes that have loaded the model."""
    instances = [
        instance
        for worker in version.workers
        for instance in (worker.instance, worker.successor, *worker.retiring)
        if instance is not None
    ]
    return [
        instance.channel
        for instance in instances
        if instance.load_seconds is not None and not instance.channel.closed.done()
    ]
