"""The loading of models, and of the items of features, at the start of a server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tsx_archiver import ARCHIVE_SUFFIXES, ArchiveError, OpenArchive
from tsx_archiver.inspecting import manifest_of
from tsx_archiver.metadata.model_limits import SAVED
from tsx_runtime.api.access.auth import check_required_tokens
from tsx_runtime.api.management.describe import memory_of
from tsx_runtime.core.hidden_credentials import SERVER_SECRETS, hidden_variables
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import BATCH_PARAMETERS, RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.telemetry.metricsconfig import read_metrics_config
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import Conflict, LoadFailed, SettingError, TsxError
from tsx_runtime.feature import LoadedItem, StartItem
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.torchserve import VersionSettings
from tsx_runtime.shared.suggestions import suggestion
from tsx_runtime.sources import Trust, is_url
from tsx_runtime.sources.store_entries import resolve_entries, resolve_file

REPORT_INTERVAL_S = 0.5

logger = logging.getLogger("tsx.server")


@dataclass(frozen=True)
class StartModel:
    """A model to load at the start.

    If `path` is None, the URL in `order` is the source, as in a registration.
    """

    path: Path | None
    order: RegisterOrder
    default: bool = False  # whether this is the default version
    archive: OpenArchive | None = None  # an open archive, if the path has no manifest
    # The files and directories of the command line that it was made of, the named one first.
    files: tuple[Path, ...] = ()


def check_models(models: Sequence[StartModel], settings: Settings) -> None:
    """Check archives before any address is bound.

    Raises:
        ArchiveError: An archive cannot be read.
        Conflict: Two archives have the same name and version.
    """
    names, errors = set(), []
    for model in models:
        # Reading the manifest of a .tar.gz would take long.
        if model.path is None or model.archive is not None or model.path.name.endswith(".gz"):
            continue
        try:
            manifest = manifest_of(model.path, limits=settings.archive_limits())
        except ArchiveError as error:
            errors.append(error)
            continue
        name = model.order.model_name or manifest.model_name
        version = model.order.version or manifest.version
        if (name, version) in names:
            raise Conflict(f"Model version {version} is already registered for model {name}")
        names.add((name, version))
    _raise_all(errors)


class LoadStatus(NamedTuple):
    """The progress of a start."""

    seconds: float
    # name of the file, step, bytes so far, total bytes
    opening: list[tuple[str, str, int, int]]
    loading: list[
        tuple[str, str, int]
    ]  # name of the model, id of the worker, bytes of the worker's memory


@contextlib.asynccontextmanager
async def report_loading(
    registry: Registry, report: Callable[[LoadStatus], None] | None
) -> AsyncIterator[None]:
    """Call `report` at intervals while models load."""
    task = None if report is None else asyncio.create_task(_watch(registry, report))
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _watch(registry: Registry, report: Callable[[LoadStatus], None]) -> None:
    start = time.monotonic()
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        versions = [
            (model.name, version)
            for model in registry.models.values()
            for version in model.versions.values()
        ]
        loading = [
            (name, worker)
            for name, version in versions
            for worker in version.workers
            if worker.state is WorkerState.LOADING
        ]
        memory = await asyncio.to_thread(memory_of, [worker for _, worker in loading])
        opening = [(path.name, *progress) for path, progress in list(registry.opening.items())]
        report(
            LoadStatus(
                time.monotonic() - start,
                opening,
                [(name, worker.id, memory[worker]) for name, worker in loading],
            )
        )


async def load_all(registry: Registry, models: Sequence[StartModel]) -> list[ModelVersion]:
    """Load all models concurrently, and wait for their workers; a failure ends the start."""
    versions = await _finish_all(_load(registry, model) for model in models)
    _set_defaults(registry, zip(models, versions, strict=True))
    return versions


async def _finish_all(load_coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all coroutines to their ends, so that one start reports all failures."""
    results = await asyncio.gather(*load_coroutines, return_exceptions=True)
    _raise_all([result for result in results if isinstance(result, BaseException)])
    return results


def _raise_all(errors: Sequence[BaseException]) -> None:
    """Raise the only error, or one error with a line for each; without errors do nothing."""
    messages = [error.message for error in errors if isinstance(error, TsxError | ArchiveError)]
    if len(messages) > 1:
        raise LoadFailed("\n".join([f"{len(messages)} files cannot be served:", *messages]))
    for error in errors:
        raise error


async def register_all(registry: Registry, models: Sequence[StartModel]) -> list[ModelVersion]:
    """Register all models without waiting for their workers, as TorchServe does.

    A model that cannot be registered is skipped, and its error is logged.
    """
    versions = await asyncio.gather(*(_register_or_log(registry, model) for model in models))
    registered = [
        (model, version)
        for model, version in zip(models, versions, strict=True)
        if version is not None
    ]
    _set_defaults(registry, registered)
    return [version for _, version in registered]


async def _load(registry: Registry, model: StartModel) -> ModelVersion:
    try:
        return await _register(
            registry, replace(model, order=replace(model.order, must_load=True)), wait=True
        )
    except LoadFailed as error:  # The message must contain the model's name.
        raise error.named(model.order.url) from error


async def _register_or_log(registry: Registry, model: StartModel) -> ModelVersion | None:
    try:
        return await _register(registry, model, wait=False)
    except TsxError as error:
        logger.error("%s is not served: %s", model.order.url, error.message)
        name, version = model.order.model_name, model.order.version
        if registry.settings.model_snapshot is not None and name and version:
            registry.not_loaded[name, version] = error.message
        return None


async def _register(registry: Registry, model: StartModel, *, wait: bool) -> ModelVersion:
    if model.archive is not None:
        return await registry.register_archive(model.archive, model.order, wait=wait)
    if model.path is None:
        return await registry.register(model.order, wait=wait, trust=Trust.OPERATOR)
    return await registry.register_path(model.path, model.order, wait=wait)


def _set_defaults(
    registry: Registry, loaded_models: Iterable[tuple[StartModel, ModelVersion]]
) -> None:
    """Set the default versions; otherwise they would depend on the order of loading."""
    configured_versions = registry.settings.model_versions
    defaults: dict[str, tuple[str, bool]] = {}
    for model, version in loaded_models:
        saved = configured_versions.get(version.name, {}).get(version.version)
        is_explicit = model.default or (saved is not None and saved.default_version is True)
        if is_explicit or version.name not in defaults:
            defaults[version.name] = version.version, is_explicit
    for name, (number, is_explicit) in defaults.items():
        registry.traffic_manager.set_initial_default(name, number, explicit=is_explicit)


def models_from_settings(settings: Settings) -> list[StartModel]:
    """Return the models of the setting `model_snapshot`, or else of `load_models`.

    Entries of `load_models` are `all`, or `[name=]file` in the model store.

    Raises:
        SettingError: A file or the model store is missing.
    """
    if settings.model_snapshot is not None:
        saved = settings.model_snapshot.models.items()
        return [
            _restore(name, number, version, settings.model_store)
            for name, versions in saved
            for number, version in versions.items()
        ]
    return [
        StartModel(path, RegisterOrder(url=file, model_name=name, loaded_at_startup=True))
        for name, file, path in resolve_entries(
            settings.load_models, settings.model_store, "model_store", _looks_like_model
        )
    ]


def _looks_like_model(path: Path) -> bool:
    """Tell whether a path may be a model; a file system's `lost+found` is not."""
    return (path.is_dir() or path.name.endswith(ARCHIVE_SUFFIXES)) and path.name != "lost+found"


def start_model(path: Path, name: str | None = None) -> StartModel:
    return StartModel(
        path, RegisterOrder(url=path.absolute().name, model_name=name, loaded_at_startup=True)
    )


def _restore(name: str, number: str, saved: VersionSettings, store: Path | None) -> StartModel:
    if not saved.mar_name:
        raise SettingError(
            f"model_snapshot.models.{name}.{number} has no marName: name its file in the model"
            " store"
        )
    order = RegisterOrder(
        url=saved.mar_name,
        model_name=name,
        version=number,
        runtime=saved.runtime_type,
        initial_workers=1 if saved.min_workers is None else saved.min_workers,
        max_workers=saved.max_workers,
        slo=saved.slo,
        **{
            name: getattr(saved, name)
            for name in SAVED
            if saved.slo is None or name not in BATCH_PARAMETERS
        },
    )
    path = None if is_url(saved.mar_name) else resolve_file(saved.mar_name, store, "model_store")
    return StartModel(path, order, saved.default_version)


async def load_items(
    registry: Registry, items: Iterable[StartItem], *, log_failures: bool
) -> list[LoadedItem]:
    """Load the items of features concurrently, and return those that are loaded.

    With `log_failures`, a failure is logged and the item skipped. Otherwise it ends the start.
    """
    loaded = await _finish_all(
        registry.feature(item.feature).load(item, log_failures=log_failures) for item in items
    )
    return [item for item in loaded if item is not None]


def warn_of_unknown_models(registry: Registry) -> None:
    """Log models that are in the settings but are not served."""
    settings, names = registry.settings, registry.names
    feature_models = (name for feature in registry.features for name in feature.named_models)
    for name in dict.fromkeys((*settings.models, *settings.model_versions, *feature_models)):
        if name not in names:
            logger.warning(
                "the settings name a model %r, and none of that name is served now%s",
                name,
                suggestion(name, names),
            )


def check_settings(settings: Settings, env: Mapping[str, str], *, platform_decides: bool) -> None:
    """Check settings before the server starts; warn if it runs as root, and log hidden variables.

    With `platform_decides`, the platform has chosen the server's user, so there is no warning.

    Raises:
        SettingError: A token is missing, or `metrics_config` cannot be used.
    """
    check_required_tokens(settings)
    if hasattr(os, "geteuid") and os.geteuid() == 0 and not platform_decides:
        logger.warning(
            "the server runs as root, and so does the code of every model; run it as a separate"
            " user (see docs/guides/security.md)"
        )
    hidden_names = [name for name in hidden_variables(settings, env) if name not in SERVER_SECRETS]
    if hidden_names:
        logger.info(
            "models cannot read these environment variables unless pass_env names them: %s",
            ", ".join(sorted(hidden_names)),
        )
    read_metrics_config(settings.metrics_config)
