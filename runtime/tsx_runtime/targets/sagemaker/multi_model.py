"""Multi-model endpoints of SageMaker, which loads, invokes and unloads models by its own routes.

https://docs.aws.amazon.com/sagemaker/latest/dg/mms-container-apis.html; the names are SageMaker's,
without a meaning. A model without room is refused with 507; SageMaker then unloads others and tries
again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from tsx_archiver import ArchiveError, is_model_name
from tsx_runtime.core.elastic.memory import MEGA, memory_of, size_of_files
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import (
    BadRequest,
    Conflict,
    LoadOutOfMemory,
    ModelNotFound,
    OutOfResources,
    SettingError,
)
from tsx_runtime.shared.memory import container_memory
from tsx_runtime.targets.server.startup import StartModel

PAGE = 100
SHARE = 0.8  # of the container's memory for models, where no bound is set
LONGEST_NAME = 100

logger = logging.getLogger("tsx.server")


class LoadedModel(NamedTuple):
    name: str  # SageMaker's
    url: str
    own: str  # in the registry


class Models:
    def __init__(
        self,
        registry: Registry,
        bound: int | None,
        opened: Callable[[Path, str], Awaitable[StartModel]],
    ) -> None:
        """`bound`: bytes that all may take. `opened(directory, name)` says what lies there."""
        self._registry = registry
        self._bound = bound or int(SHARE * container_memory())
        self._opened = opened
        self._loaded: dict[str, LoadedModel] = {}
        self._coming: dict[str, int] = {}  # by name, bytes that each needs at least

    async def load(self, name: str, url: str) -> LoadedModel:
        """Raises Conflict (already loaded), OutOfResources (no room), BadRequest (no model),
        LoadFailed.
        """
        if name in self._loaded or name in self._coming:
            raise Conflict(f"Model {name} is loaded already.")
        if not name or not url:
            raise BadRequest('Send {"model_name": "NAME", "url": "DIRECTORY"} to load a model.')
        self._coming[name] = 0
        try:
            self._coming[name] = await asyncio.to_thread(size_of, Path(url))
            await self._check(f"it needs {self._coming[name] // MEGA} MB at least, and ")
            loaded = LoadedModel(name, url, registry_name(name))
            await self._register(loaded)
            self._loaded[name] = loaded
        finally:
            del self._coming[name]
        try:
            await self._check("with it ")
        except OutOfResources:
            await self.unload(name)
            raise
        logger.info("model %s is loaded from %s", name, url)
        return loaded

    async def unload(self, name: str) -> None:
        """Returns once its requests are answered and its processes have ended.

        Raises ModelNotFound.
        """
        await self._registry.unregister(self.find(name).own)
        self._loaded.pop(name, None)
        logger.info("model %s is unloaded", name)

    def find(self, name: str) -> LoadedModel:
        """Raises ModelNotFound."""
        try:
            return self._loaded[name]
        except KeyError:
            raise ModelNotFound(f"Model not found: {name}. It is not loaded.") from None

    def page(self, token: str | None) -> tuple[list[LoadedModel], str | None]:
        """In the order of loading, from the end of the last page. Raises BadRequest."""
        try:
            start = max(0, int(token or 0))
        except ValueError:
            raise BadRequest(
                f"next_page_token is {token!r}, which is not a valid page token."
            ) from None
        return list(self._loaded.values())[start : start + PAGE], (
            str(start + PAGE) if len(self._loaded) > start + PAGE else None
        )

    async def _register(self, loaded: LoadedModel) -> None:
        try:
            model = await self._opened(Path(loaded.url), loaded.own)
        except (SettingError, ArchiveError) as error:
            raise BadRequest(str(error)) from error
        try:
            if model.archive is not None:
                await self._registry.register_archive(model.archive, model.order)
            elif model.path is not None:
                await self._registry.register_path(model.path, model.order)
        except LoadOutOfMemory as error:
            raise OutOfResources(f"Model {loaded.name} does not fit: {error.message}") from error

    async def _check(self, what: str) -> None:
        """Raises OutOfResources."""
        taken = await asyncio.to_thread(memory_of, self._registry.workers())
        coming = sum(self._coming.values())
        if taken + coming > self._bound:
            text = (
                f"There is no room for the model: {what}{taken // MEGA} MB of {self._bound // MEGA}"
                " MB are taken"
            )
            raise OutOfResources(f"{text} (TSX_SAGEMAKER_MODELS_MEMORY). Unload others first.")


def registry_name(name: str) -> str:
    return (
        name
        if is_model_name(name) and len(name) <= LONGEST_NAME
        else f"model-{hashlib.sha256(name.encode()).hexdigest()[:24]}"
    )


def size_of(directory: Path) -> int:
    """Raises BadRequest."""
    if not directory.is_dir():
        raise BadRequest(f"The model's url is {directory}, which is not a directory.")
    return size_of_files(directory)
