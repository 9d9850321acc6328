"""The models of a multi-model endpoint, which SageMaker loads and unloads by requests.

See https://docs.aws.amazon.com/sagemaker/latest/dg/mms-container-apis.html. Models have names that
SageMaker has generated. If there is not enough memory for a model, the response is 507. SageMaker
then unloads other models and tries again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from tsx_archiver import ArchiveError, is_model_name
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.workers.memory import MEGA, memory_of, size_of_files
from tsx_runtime.errors import (
    BadRequest,
    Conflict,
    LoadOutOfMemory,
    ModelNotFound,
    OutOfResources,
    SettingError,
)
from tsx_runtime.server.startup import StartModel
from tsx_runtime.shared.memory import container_memory

PAGE_MODELS = 100
MEMORY_FRACTION = 0.8  # default fraction of the container's memory for models
MAX_NAME_CHARS = 100

logger = logging.getLogger("tsx.server")


class LoadedModel(NamedTuple):
    name: str  # name that SageMaker uses
    url: str
    registered_name: str  # name in the registry


class Models:
    def __init__(
        self,
        registry: Registry,
        max_bytes: int | None,
        open_model: Callable[[Path, str], Awaitable[StartModel]],
    ) -> None:
        """Create an empty collection of models.

        Args:
            registry: The registry of the server.
            max_bytes: Limit for the memory of all models; None for `MEMORY_FRACTION`.
            open_model: Returns the model, from its directory and name.
        """
        self._registry = registry
        self._max_bytes = max_bytes or int(MEMORY_FRACTION * container_memory())
        self._open_model = open_model
        self._loaded: dict[str, LoadedModel] = {}
        self._loading_bytes: dict[
            str, int
        ] = {}  # minimum memory of the models that are loading, by name

    async def load(self, name: str, url: str) -> LoadedModel:
        """Load a model.

        Raises:
            Conflict: The model is already loaded.
            OutOfResources: There is not enough memory for the model.
            BadRequest: The name is missing, or the directory has no model.
            LoadFailed: No worker could load the model.
        """
        if name in self._loaded or name in self._loading_bytes:
            raise Conflict(f"Model {name} is loaded already.")
        if not name or not url:
            raise BadRequest('Send {"model_name": "NAME", "url": "DIRECTORY"} to load a model.')
        self._loading_bytes[name] = 0
        try:
            self._loading_bytes[name] = await asyncio.to_thread(size_of, Path(url))
            await self._check_memory(
                f"it needs {self._loading_bytes[name] // MEGA} MB at least, and "
            )
            loaded_model = LoadedModel(name, url, registry_name(name))
            await self._register(loaded_model)
            self._loaded[name] = loaded_model
        finally:
            del self._loading_bytes[name]
        try:
            await self._check_memory("with it ")
        except OutOfResources:
            await self.unload(name)
            raise
        logger.info("model %s is loaded from %s", name, url)
        return loaded_model

    async def unload(self, name: str) -> None:
        """Unload a model; return once its requests are answered and its processes have ended.

        Raises:
            ModelNotFound: The model is not loaded.
        """
        await self._registry.unregister(self.find(name).registered_name)
        self._loaded.pop(name, None)
        logger.info("model %s is unloaded", name)

    def find(self, name: str) -> LoadedModel:
        """Return a loaded model.

        Raises:
            ModelNotFound: The model is not loaded.
        """
        try:
            return self._loaded[name]
        except KeyError:
            raise ModelNotFound(f"Model not found: {name}. It is not loaded.") from None

    def page(self, token: str | None) -> tuple[list[LoadedModel], str | None]:
        """Return a page of models in the order of loading, and the token of the next page.

        Raises:
            BadRequest: The token is invalid.
        """
        try:
            start = max(0, int(token or 0))
        except ValueError:
            raise BadRequest(
                f"next_page_token is {token!r}, which is not a valid page token."
            ) from None
        return list(self._loaded.values())[start : start + PAGE_MODELS], (
            str(start + PAGE_MODELS) if len(self._loaded) > start + PAGE_MODELS else None
        )

    async def _register(self, loaded_model: LoadedModel) -> None:
        try:
            model = await self._open_model(Path(loaded_model.url), loaded_model.registered_name)
        except (SettingError, ArchiveError) as error:
            raise BadRequest(str(error)) from error
        try:
            if model.archive is not None:
                await self._registry.register_archive(model.archive, model.order)
            elif model.path is not None:
                await self._registry.register_path(model.path, model.order)
        except LoadOutOfMemory as error:
            raise OutOfResources(
                f"Model {loaded_model.name} does not fit: {error.message}"
            ) from error

    async def _check_memory(self, prefix: str) -> None:
        """Check that there is enough memory, including for models that are loading.

        Raises:
            OutOfResources: There is not enough memory.
        """
        used_bytes = await asyncio.to_thread(memory_of, self._registry.workers())
        loading_bytes = sum(self._loading_bytes.values())
        if used_bytes + loading_bytes > self._max_bytes:
            text = (
                f"There is no room for the model: {prefix}{used_bytes // MEGA} MB of"
                f" {self._max_bytes // MEGA} MB are taken"
            )
            raise OutOfResources(f"{text} (TSX_SAGEMAKER_MODELS_MEMORY). Unload others first.")


def registry_name(name: str) -> str:
    return (
        name
        if is_model_name(name) and len(name) <= MAX_NAME_CHARS
        else f"model-{hashlib.sha256(name.encode()).hexdigest()[:24]}"
    )


def size_of(directory: Path) -> int:
    """Return the size of a model's files in bytes.

    Raises:
        BadRequest: The path is not a directory.
    """
    if not directory.is_dir():
        raise BadRequest(f"The model's url is {directory}, which is not a directory.")
    return size_of_files(directory)
