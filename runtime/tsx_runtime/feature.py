"""The interface of features, and their loader.

A feature is an optional part of the server: a folder of `tsx_runtime.features`. The server finds
the modules of the folder by their names; each of them is optional:

- `feature.py` has a subclass of `Feature`.
- `settings.py` has subclasses of `FeatureSettings` and `FeatureModelSettings`
  (`tsx_runtime.settings.fields`). Their fields become settings of the server and of models.
- `description.py` has a subclass of `FeatureDescription` (`tsx_runtime.api.management.camel`). Its
  fields become a part of the description of a version.
- `handlers.py` has `HANDLERS`, the built-in handlers of the feature.
- `loop.py` is the loop of workers in the mode with the feature's name (`worker.execution.loop`).

`docs/guides/add-a-feature.md` builds a feature.
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
    # Features import these names from here, because their modules import FastAPI and
    # prometheus_client, which only a server that listens needs.
    ServerApp = ServerContext = Families = Labels = Any

ModelT = TypeVar("ModelT", bound=BaseModel)


class StartItem(NamedTuple):
    """An item, such as a workflow, that a feature loads at the start of a server.

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
    details: dict[str, str]  # further columns in the table of this kind, by their headings


class Port(NamedTuple):
    """A port of a feature, which starts and stops together with the HTTP servers."""

    target: str  # HOST:PORT for clients
    roles: list[str]
    start: Callable[[], Awaitable[None]]
    stop: Callable[[float], Awaitable[None]]  # gets the seconds in which running calls may finish


class Feature:
    """An optional part of a server.

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
        """Return the items that `load` gets at the start of a server with these settings.

        This is not called for features of plugins, because plugins are loaded later.

        Raises:
            SettingError: An item cannot be found.
        """
        return ()

    async def open_environment(
        self, model: str, archive: OpenArchive, url: str
    ) -> ModelEnvironment | None:
        """Return the environment of the workers of a version, before it is registered, or None.

        The server closes it together with the version, or if the registration fails.

        Raises:
            BadRequest: The model may not have this environment.
            InvalidModel: The environment cannot be created.
        """
        return None

    def check_installation(self, model: str, requirements_file: str) -> None:
        """Check that packages of a model may be installed; pip runs their code outside its workers.

        Raises:
            BadRequest: Code of the model must not run outside its workers.
        """

    def around(self, version: ModelVersion, entry: EntryPoint) -> EntryPoint | None:
        """Return the entry point of a version's requests, which replaces `entry`, or None.

        The server calls this when it registers the version, and again after each change of the
        version's limits, but not for each request. With None, requests bypass the feature.

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
        """The names of models in the feature's settings; the server logs those it does not have."""
        return ()

    async def open_url(
        self,
        order: RegisterOrder,
        trust: Trust,
        downloads: Downloads,
        progress: Callable[[int, int], None],
    ) -> tuple[OpenArchive, RegisterOrder] | None:
        """Open the model at a URL that only this feature knows; return None for other URLs.

        The returned order has a URL that always means the same model.

        Args:
            order: The order of a registration.
            trust: Whether a client or the operator has given the URL.
            downloads: The threads in which the model is downloaded.
            progress: A callback that gets the bytes so far, and the total bytes.

        Raises:
            BadRequest: The model cannot be served.
            ModelNotFound: The model does not exist, or is not allowed.
            DownloadFailed: The download failed.
        """
        return None

    def dispatcher(self, version: ModelVersion) -> Dispatcher | None:
        """Return the dispatcher for a version, or None if its configuration does not need it.

        `version` is still being constructed: it has its plan, archive and label, but no workers.
        """
        return None

    def sandbox(self, version: ModelVersion, worker: Worker, program: Launch) -> Sandbox | None:
        """Return the sandbox in which a process of the worker must run `program`, or None.

        After an error, or if two features return a sandbox, the process is not started.
        """
        return None

    def explain(self, version: ModelVersion, error: LoadFailed) -> None:
        """Add advice to the message of the error with which a version failed to load.

        The server calls this only for registrations that wait for the workers.
        """

    def loading(
        self, version: ModelVersion, worker: Worker
    ) -> AbstractAsyncContextManager[None] | None:
        """Return a context that is open while a process of the worker loads the model, or None.

        The context may raise LoadFailed when it is entered; the process is then not started.
        """
        return None

    async def load(self, item: StartItem, *, log_failures: bool) -> LoadedItem | None:
        """Load an item of `start_items` after all models.

        With `log_failures`, log an error instead of raising it, and return None.

        Raises:
            TsxError: The item cannot be loaded.
        """
        return None

    def end_version(self, version: ModelVersion) -> None:
        """Forget a version that has ended."""

    def describe(self, version: ModelVersion) -> Mapping[str, object]:
        """Return the feature's fields in the description of a version; see `description.py`."""
        return {}

    def add_routes(self, app: ServerApp) -> None:
        """Add the routes of the feature to a listener that has the roles `app.roles`."""

    def add_version_metrics(
        self, families: Families, version: ModelVersion, labels: Labels
    ) -> None:
        """Add the metrics of a version to `/metrics`.

        This must take less than a millisecond, because it runs on the event loop.
        """

    async def add_metrics(self, families: Families, host: str) -> None:
        """Add the metrics that do not belong to a version to `/metrics`."""

    def addresses(self) -> Sequence[tuple[Address, list[str]]]:
        """Return the addresses that `listen` will bind, each with its roles.

        The server checks that they are free before it loads models.
        """
        return ()

    def serving(self) -> AbstractContextManager[None]:
        """Return a context that is open from the binding of the addresses to the last answer.

        The server loads models and builds apps while it is open. A replica of Ray also enters it; a
        Lambda function does not.

        Raises:
            SettingError: The settings of the feature cannot be used.
        """
        return nullcontext()

    async def listen(self, context: ServerContext) -> Sequence[Port]:
        """Bind the ports of the feature, after the models are registered.

        Replicas of Ray and Lambda functions do not call this.

        Raises:
            SettingError: A port or the settings of the feature cannot be used.
        """
        return ()

    def open(self) -> None:
        """Prepare to serve clients, after the addresses are bound and before models are loaded.

        It is not called on SageMaker, Ray and Lambda, where the platform passes requests on.

        Raises:
            SettingError: The settings of the feature cannot be used.
        """

    def follow(self, seconds: float) -> None:
        """Take over from the server that this one replaces; that one ends within `seconds`."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a context that is open while requests are answered, such as a background task.

        A Lambda function does not enter it.
        """
        return nullcontext()

    async def before_freeze(self, seconds: float, *, ends: bool) -> None:
        """Save for at most `seconds` what a frozen process could lose, such as recorded requests.

        Only a Lambda function calls this: at the end of each invocation, before its answer is
        returned. With `ends`, the process ends afterwards.
        """

    def hand_over(self) -> None:
        """Stop what only one server may do, because another server replaces this one."""

    async def stop(self, seconds: float, stop_now: asyncio.Event) -> None:
        """Finish the accepted work; return after `seconds`, or when `stop_now` is set.

        HTTP servers and ports stop at the same time.
        """

    def begin_close(self) -> None:
        """Stop acting on models, because their versions end next."""

    async def close(self) -> None:
        """Write what must not be lost, after all versions have ended."""


def load_features(registry: Registry) -> list[Feature]:
    """Return the features of a server, in the order in which requests pass through them."""
    return [kind(registry) for kind in (*_feature_classes(), *registry.plugins.features.values())]


def start_items(settings: Settings) -> list[StartItem]:
    """Return the items that the features load at the start of a server with these settings.

    Raises:
        SettingError: An item cannot be found.
    """
    return [item for kind in _feature_classes() for item in kind.start_items(settings)]


def extended(base: type[ModelT], kind: type[BaseModel], module: str) -> type[ModelT]:
    """Return a subclass of `base` that also has the fields of all features.

    Args:
        base: The class, whose fields come first.
        kind: The class whose subclasses in features have the additional fields.
        module: The name of the modules that define them, such as `settings`.
    """
    features.modules(module)
    bases: Any = (*reversed(kind.__subclasses__()), base)
    model: type[ModelT] = create_model(
        base.__name__, __base__=bases, __module__=base.__module__, __doc__=base.__doc__
    )
    return model


def _feature_classes() -> list[type[Feature]]:
    return [
        kind
        for module in features.modules("feature")
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Feature)
        and kind.__module__ == module.__name__
    ]
