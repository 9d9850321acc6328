"""The interface of features, and their loader.

A feature is an optional part of the server: a folder of `tsx_runtime.features`. Its `feature.py`
has a subclass of `Feature`, which the server finds without a list. Its `settings.py` may have
subclasses of `FeatureSettings` and `FeatureModelSettings`, and its `description.py` one of
`FeatureDescription`; the settings of the server and the description of a version have their fields.
`docs/guides/add-a-feature.md` builds one.
"""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, create_model

from tsx_runtime import features

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from tsx_archiver import OpenArchive
    from tsx_runtime.core.models.model import ModelVersion
    from tsx_runtime.core.registry.registry import Registry
    from tsx_runtime.core.scheduling.strategies import EntryPoint
    from tsx_runtime.core.workers.launch import Launch, ModelEnvironment, Sandbox
    from tsx_runtime.core.workers.worker import Worker
    from tsx_runtime.errors import LoadFailed
    from tsx_runtime.http.app import ServerApp
    from tsx_runtime.metrics.exposition import Families, Labels

ModelT = TypeVar("ModelT", bound=BaseModel)


class Feature:
    """A part of a server that can be left out.

    The server calls these methods. Those that a feature does not override do nothing.
    """

    def __init__(self, registry: Registry) -> None:
        """Prepare the feature of a server, before any model is registered.

        Raises:
            SettingError: The settings of the feature cannot be used.
        """
        self.registry = registry

    async def open_environment(
        self, model: str, archive: OpenArchive, url: str
    ) -> ModelEnvironment | None:
        """Return the environment of a future version's workers, or None.

        It is closed with the version, or if that is refused.

        Raises:
            BadRequest: The model may not have this environment.
            InvalidModel: The environment cannot be made.
        """
        return None

    def check_installation(self, model: str, requirements_file: str) -> None:
        """Check that packages of a model may be installed, which runs code outside its workers.

        Raises:
            BadRequest: The model may run no code there.
        """

    def around(self, version: ModelVersion, entry: EntryPoint) -> EntryPoint | None:
        """Return the entry point of a version's requests, in place of `entry`.

        The server asks when the version is registered, and again after its limits were changed.
        None means that the feature is not on the path of this version, and so costs it nothing.

        Raises:
            BadRequest: The configuration of the version excludes the feature.
        """
        return None

    def sandbox(self, version: ModelVersion, worker: Worker, program: Launch) -> Sandbox | None:
        """Return the sandbox in which a process of the worker must run `program`, or None.

        After an error, or if two features return a sandbox, the process is not started.
        """
        return None

    def loading(
        self, version: ModelVersion, worker: Worker
    ) -> AbstractAsyncContextManager[None] | None:
        """Return a context that is open while a process of the worker loads the model, or None.

        Entering it may raise LoadFailed, which refuses the load.
        """
        return None

    def explain(self, version: ModelVersion, error: LoadFailed) -> None:
        """Add advice to the error of a version that is refused since it could not be loaded."""

    def end_version(self, version: ModelVersion) -> None:
        """Forget a version, which has ended."""

    def describe(self, version: ModelVersion) -> Mapping[str, object]:
        """Return the values of the fields in `description.py`."""
        return {}

    def add_routes(self, app: ServerApp) -> None:
        """Add the routes that a listener with the roles `app.roles` should have."""

    def add_version_metrics(
        self, families: Families, version: ModelVersion, labels: Labels
    ) -> None:
        """Add the metrics of a version to `/metrics`; this takes less than a millisecond."""

    async def add_metrics(self, families: Families, host: str) -> None:
        """Add the metrics that concern no single version to `/metrics`."""

    def open(self) -> None:
        """Prepare to serve the clients of a server whose addresses are bound.

        It is not called where a platform, such as SageMaker, leads requests to the models.

        Raises:
            SettingError: The settings of the feature cannot be used.
        """

    def follow(self, seconds: float) -> None:
        """Take over from the server that this one replaces, which ends within `seconds`."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return the context in which the server answers requests, such as a background task."""
        return nullcontext()

    def hand_over(self) -> None:
        """Leave to the server that replaces this one what only one server may do."""

    async def stop(self, seconds: float, stop_now: asyncio.Event) -> None:
        """Finish what was accepted, for up to `seconds` or until `stop_now`."""

    def begin_close(self) -> None:
        """Stop acting on models; their versions end next."""

    async def close(self) -> None:
        """Write what must not be lost; all versions have ended."""


def load_features(registry: Registry) -> list[Feature]:
    """Return the features of a server, in the order in which requests pass through them."""
    kinds = [
        kind
        for module in _modules("feature")
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Feature)
        and kind.__module__ == module.__name__
    ]
    return [kind(registry) for kind in (*kinds, *registry.plugins.features.values())]


def extended(base: type[ModelT], kind: type[BaseModel], module: str) -> type[ModelT]:
    """Return a subclass of `base` with the fields of each subclass of `kind` in a feature.

    Args:
        base: The class, whose fields come first.
        kind: The common class of the additional fields.
        module: The module of a feature's folder that defines them.
    """
    _modules(module)
    bases: Any = (*reversed(kind.__subclasses__()), base)
    model: type[ModelT] = create_model(
        base.__name__, __base__=bases, __module__=base.__module__, __doc__=base.__doc__
    )
    return model


@cache
def _modules(name: str) -> list[ModuleType]:
    """Import the modules of this name in the folders of all features."""
    folders = [folder.name for folder in pkgutil.iter_modules(features.__path__)]
    folders.sort(key=lambda folder: (*features.ORDER, folder).index(folder))
    return [
        importlib.import_module(f"{features.__name__}.{folder}.{name}")
        for folder in folders
        if importlib.util.find_spec(f"{features.__name__}.{folder}.{name}") is not None
    ]
