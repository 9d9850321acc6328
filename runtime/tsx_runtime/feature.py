"""The interface of features, and their loader.

A feature is an optional part of the server: a folder of `tsx_runtime.features`. Its `feature.py`
has a subclass of `Feature`, which the server finds without a list. Its `settings.py` may have
subclasses of `FeatureSettings` and `FeatureModelSettings`, and its `description.py` one of
`FeatureDescription`; the settings of the server and the description of a version have their fields.
Its `handlers.py` may name built-in handlers, which a worker finds there.
Its `loop.py` may be the loop of workers in the mode of its name (`worker.execution.loop`).
`docs/guides/add-a-feature.md` builds one.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import BaseModel, create_model

from tsx_runtime import features

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from tsx_archiver import OpenArchive
    from tsx_runtime.core.models.model import ModelVersion
    from tsx_runtime.core.models.plan import HandlerDefaults, RegisterOrder
    from tsx_runtime.core.registry.downloads import Downloads
    from tsx_runtime.core.registry.registry import Registry
    from tsx_runtime.core.scheduling.dispatcher import Dispatcher
    from tsx_runtime.core.scheduling.strategies import EntryPoint
    from tsx_runtime.core.workers.launch import Launch, ModelEnvironment, Sandbox
    from tsx_runtime.core.workers.worker import Worker
    from tsx_runtime.errors import LoadFailed
    from tsx_runtime.http.app import ServerApp as ServerApp
    from tsx_runtime.http.context import ServerContext as ServerContext
    from tsx_runtime.metrics.exposition import Families as Families
    from tsx_runtime.metrics.exposition import Labels as Labels
    from tsx_runtime.settings.addresses import Address
    from tsx_runtime.settings.schema import Settings
    from tsx_runtime.sources import Trust
else:
    # A feature imports these names from here: their modules import FastAPI, which only a server that
    # listens needs.
    ServerApp = ServerContext = Families = Labels = Any

ModelT = TypeVar("ModelT", bound=BaseModel)


class StartItem(NamedTuple):
    """Something besides models that a feature loads at the start of a server.

    If `path` is None, the URL is the source, as in a registration.
    """

    feature: type[Feature]
    path: Path | None
    url: str
    name: str | None


class LoadedItem(NamedTuple):
    """What a feature has loaded for a `StartItem`, for the output of `tsx serve`."""

    kind: str  # such as "workflow"
    name: str
    path: str  # the path of its requests
    details: dict[str, str]  # the further columns of a table of this kind


class Port(NamedTuple):
    """A port of a feature, which starts and stops together with the HTTP servers."""

    target: str  # HOST:PORT for clients
    roles: list[str]
    start: Callable[[], Awaitable[None]]
    stop: Callable[[float], Awaitable[None]]  # takes the seconds in which running calls may finish


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

    @classmethod
    def start_items(cls, settings: Settings) -> Sequence[StartItem]:
        """Return the items that `load` should get at the start of a server with these settings.

        Features of plugins are not asked, because plugins are loaded later.

        Raises:
            SettingError: An item cannot be found.
        """
        return ()

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

    def handler_defaults(
        self, name: str, handler: str, archive: OpenArchive
    ) -> HandlerDefaults | None:
        """Return the defaults of a handler of this feature for a model, or None."""
        return None

    def handler_properties(self, model: str) -> Mapping[str, Any]:
        """Return the `system_properties` that a model's handler gets from this feature."""
        return {}

    @property
    def named_models(self) -> Collection[str]:
        """The models that the settings of the feature name; a server should have each of them."""
        return ()

    async def open_url(
        self,
        order: RegisterOrder,
        trust: Trust,
        downloads: Downloads,
        progress: Callable[[int, int], None],
    ) -> tuple[OpenArchive, RegisterOrder] | None:
        """Open the model at a URL of a kind that only this feature knows; return None for others.

        Args:
            order: The registration; the returned one has a URL that always means this model.
            trust: The origin of the URL.
            downloads: The threads in which the model is downloaded.
            progress: A callback with the bytes so far, and all bytes.

        Raises:
            BadRequest: The model cannot be served.
            ModelNotFound: The model does not exist, or is not allowed.
            DownloadFailed: The download failed.
        """
        return None

    def dispatcher(self, version: ModelVersion) -> Dispatcher | None:
        """Return the dispatcher of a version whose configuration needs one of the feature, or None.

        The version is being registered; of its attributes, those of its plan and archive are set.
        """
        return None

    def sandbox(self, version: ModelVersion, worker: Worker, program: Launch) -> Sandbox | None:
        """Return the sandbox in which a process of the worker must run `program`, or None.

        After an error, or if two features return a sandbox, the process is not started.
        """
        return None

    def explain(self, version: ModelVersion, error: LoadFailed) -> None:
        """Add advice to the error of a version that is refused since it could not be loaded."""

    def loading(
        self, version: ModelVersion, worker: Worker
    ) -> AbstractAsyncContextManager[None] | None:
        """Return a context that is open while a process of the worker loads the model, or None.

        Entering it may raise LoadFailed, which refuses the load.
        """
        return None

    async def load(self, item: StartItem, *, log_failures: bool) -> LoadedItem | None:
        """Load an item at the start, after all models.

        With `log_failures`, an error is logged, and the result is None.

        Raises:
            TsxError: The item cannot be loaded.
        """
        return None

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

    def addresses(self) -> Sequence[tuple[Address, list[str]]]:
        """Return the addresses of `listen`, with their roles, to check that they are free."""
        return ()

    def serving(self) -> AbstractContextManager[None]:
        """Return the context of a server, from the bound addresses to the last answer.

        Models are loaded and apps are built inside of it. A Lambda function does not enter it.

        Raises:
            SettingError: The settings of the feature cannot be used.
        """
        return nullcontext()

    async def listen(self, context: ServerContext) -> Sequence[Port]:
        """Bind the ports of the feature; models are registered.

        Raises:
            SettingError: A port or the settings of the feature cannot be used.
        """
        return ()

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
    return [kind(registry) for kind in (*_kinds(), *registry.plugins.features.values())]


def start_items(settings: Settings) -> list[StartItem]:
    """Return the items that the features load at the start of a server with these settings.

    Raises:
        SettingError: An item cannot be found.
    """
    return [item for kind in _kinds() for item in kind.start_items(settings)]


def extended(base: type[ModelT], kind: type[BaseModel], module: str) -> type[ModelT]:
    """Return a subclass of `base` with the fields of each subclass of `kind` in a feature.

    Args:
        base: The class, whose fields come first.
        kind: The common class of the additional fields.
        module: The module of a feature's folder that defines them.
    """
    features.modules(module)
    bases: Any = (*reversed(kind.__subclasses__()), base)
    model: type[ModelT] = create_model(
        base.__name__, __base__=bases, __module__=base.__module__, __doc__=base.__doc__
    )
    return model


def _kinds() -> list[type[Feature]]:
    return [
        kind
        for module in features.modules("feature")
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Feature)
        and kind.__module__ == module.__name__
    ]
