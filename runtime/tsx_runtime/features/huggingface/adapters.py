"""LoRA adapters that are added to a model while it is served.

Workers load a copy in the server's state directory, also those that start later, and those of the
next server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path

from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.huggingface import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    GENERATION_HANDLER,
    packed_adapters,
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
SOURCE = "source"  # name of the file beside a copy that tells where it comes from

logger = logging.getLogger("tsx.registry")


class Adapters:
    """The adapters that were added to the models of a server.

    They belong to a name and a number, so that a version leaves them to the one that replaces it.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # The adapters of a version change one after the other, so that its workers agree. A version
        # that has had neither a worker nor a change has no lock.
        self._locks = defaultdict[tuple[str, str], asyncio.Lock](asyncio.Lock)

    def find(self, model: str | None) -> ModelVersion:
        """Return the version `NAME[:VERSION]`, or for None the only one that generates text.

        Raises:
            BadRequest: The version generates no text, or none is named and several do.
            ModelNotFound: There is no such model.
        """
        name, _, number = (model or "").partition(":")
        names = [name] if model else self._registry.models
        versions = [self._registry.find(name, number or None) for name in names]
        candidates = [version for version in versions if version.handler == GENERATION_HANDLER]
        if len(candidates) != 1:
            raise BadRequest(
                f"The field 'model' must name a model that generates text; it is {model!r}."
            )
        return candidates[0]

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
        copy = Path(tempfile.mkdtemp(prefix=".", dir=root))
        try:
            fetch = partial(self._fetch, name, source, copy)
            await self._registry.downloads.call(fetch, lambda _: None)
            async with self._lock(version):
                self._check_name(version, name, in_place)
                await self._set(version, name, copy)
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    async def remove(self, version: ModelVersion, name: str) -> None:
        """Remove an adapter from all workers of a version; its sequences end first.

        Raises:
            ModelNotFound: No adapter of this name was added.
        """
        async with self._lock(version):
            if name not in version.added_adapters:
                raise ModelNotFound(f"The lora adapter '{name}' cannot be found.")
            await self._set(version, name, None)

    async def load_into(self, version: ModelVersion, channel: Channel) -> None:
        """Add the adapters to a worker that has loaded the model."""
        async with self._lock(version):
            for name in version.added_adapters:
                if error := await channel.set_adapter(name, self.directory(version) / name):
                    text = f"A worker serves without the adapter {name}: {error}"
                    logger.error("%s: %s", version.label, text)
                    version.stats.error_log.add_error(text, "")

    def restore(self, version: ModelVersion) -> None:
        """Set the adapters of a version whose copies the state directory has."""
        if self._registry.state.directory is not None:
            root = self.directory(version)
            files = root.glob(f"[!.]*/{SOURCE}")
            version.added_adapters = {file.parent.name: file.read_text() for file in sorted(files)}
            version.readable = (root,)

    def forget(self, version: ModelVersion) -> None:
        """Remove the copies of a version that was unregistered, not of one that failed to load."""
        model = self._registry.models.get(version.name)
        is_replaced = model is not None and version.version in model.versions
        is_kept = is_replaced or self._registry.downloads.closed.is_set()
        if not is_kept and (version.name, version.version) in self._locks:
            for root in version.readable:
                shutil.rmtree(root, ignore_errors=True)

    def directory(self, version: ModelVersion) -> Path:
        """Return the directory for the copies of a version's adapters, by their names.

        Raises:
            BadRequest: The server has no directory for its state.
        """
        root = self._registry.state.directory
        if root is None:
            raise BadRequest("Adapters are kept in state_dir. Set it to a directory of its own.")
        return root.absolute() / "adapters" / version.name / version.version

    def _lock(self, version: ModelVersion) -> asyncio.Lock:
        return self._locks[version.name, version.version]

    def _check_name(self, version: ModelVersion, name: str, in_place: bool) -> None:
        if name in packed_adapters(version.manifest):
            raise BadRequest(f"The lora adapter '{name}' is a part of the model's archive.")
        if name in version.added_adapters and not in_place:
            raise BadRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the"
                " adapter in place, set 'load_inplace' to True."
            )

    def _fetch(self, name: str, source: str, directory: Path) -> None:
        """Copy or download an adapter into a directory, and check it; this blocks."""
        settings, closed = self._registry.settings, self._registry.downloads.closed
        origin = directory
        if is_hub(source):
            model = parse_hub(source)
            check_allowed(model, settings.allowed_urls)
            origin = download(model, max_bytes=settings.max_archive_size, stopped=closed.is_set)
        elif is_url(source):
            fetcher = Fetcher(settings, directory, FILES, self._registry.plugins.sources, closed)
            for file in FILES:
                fetcher.fetch(f"{source.rstrip('/')}/{file}", Trust.CLIENT)
        else:
            origin = in_store(source, settings.model_store, "No adapter found for")
        for file in FILES:
            if not os.access(origin / file, os.R_OK):
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
        (directory / SOURCE).write_text(source)

    async def _set(self, version: ModelVersion, name: str, copy: Path | None) -> None:
        """Set an adapter in all workers, or remove it if `copy` is None, and save the change.

        Raises:
            BadRequest: A worker refuses the adapter. All have the previous one again.
            ModelNotFound: The version was unregistered.
        """
        target = self.directory(version) / name
        channels = [
            instance.channel
            for sibling in self._siblings(version)
            for worker in sibling.workers
            for instance in (worker.instance, worker.successor)
            if instance and instance.load_seconds is not None and not instance.channel.closed.done()
        ]

        async def send(directory: Path | None) -> list[str]:
            answers = (channel.set_adapter(name, directory) for channel in channels)
            return [error for error in await asyncio.gather(*answers) if error]

        errors = await send(copy)
        if copy and errors:
            await send(target if name in version.added_adapters else None)
            raise BadRequest(errors[0])
        self._registry.find(version.name, version.version)
        shutil.rmtree(target, ignore_errors=True)
        if copy:
            shutil.move(copy, target)
        for sibling in self._siblings(version):
            self.restore(sibling)

    def _siblings(self, version: ModelVersion) -> list[ModelVersion]:
        """Return the version, with those that it replaces or that replace it."""
        return [
            sibling
            for sibling in self._registry.all_versions()
            if (sibling.name, sibling.version) == (version.name, version.version)
        ]
