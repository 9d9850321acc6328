"""Loads the models and workflows of a server at its start."""

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
from tsx_runtime.api.management.describe import memory_of
from tsx_runtime.core.isolation.hidden_credentials import SERVER_SECRETS, hidden_variables
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import KNOBS, RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import Conflict, LoadFailed, SettingError, TsxError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.torchserve import VersionSettings
from tsx_runtime.shared.suggestions import suggestion
from tsx_runtime.sources import Trust, is_url
from tsx_runtime.workflows.manager import SUFFIX, Workflow, WorkflowOrder, Workflows

TICK = 0.5  # seconds between two looks at what loads

logger = logging.getLogger("tsx.server")


@dataclass(frozen=True)
class StartModel:
    """A model to load at the start.

    Without a path the order's URL says where it comes from, as in a registration.
    """

    path: Path | None
    order: RegisterOrder
    default: bool = False  # of several versions, the one for requests that name none
    archive: OpenArchive | None = None  # opened already, where the path holds no manifest


def check_models(models: Sequence[StartModel], settings: Settings) -> None:
    """Refuse, before any port is bound, archives that cannot be read and two of one name and
    version. Raises ArchiveError, Conflict.
    """
    taken, errors = set(), []
    for model in models:
        # Reading it takes long.
        if model.path is None or model.archive is not None or model.path.name.endswith(".gz"):
            continue
        try:
            manifest = manifest_of(model.path, limits=settings.archive_limits())
        except ArchiveError as error:
            errors.append(error)
            continue
        name, version = (
            model.order.model_name or manifest.model_name,
            model.order.version or manifest.version,
        )
        if (name, version) in taken:
            raise Conflict(f"Model version {version} is already registered for model {name}")
        taken.add((name, version))
    _raise_all(errors)


class LoadStatus(NamedTuple):
    """What a start waits for.

    Bytes: so far and in all, of an archive that is being opened; the memory of a worker that loads
    a model.
    """

    seconds: float
    opening: list[
        tuple[str, str, int, int]
    ]  # the file's name, the step, bytes so far, bytes in all
    loading: list[tuple[str, str, int]]  # model, worker, bytes


@contextlib.asynccontextmanager
async def watched_loading(
    registry: Registry, tell: Callable[[LoadStatus], None] | None
) -> AsyncIterator[None]:
    """Calls `tell` while models load."""
    task = None if tell is None else asyncio.create_task(_watch(registry, tell))
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _watch(registry: Registry, tell: Callable[[LoadStatus], None]) -> None:
    begun = time.monotonic()
    while True:
        await asyncio.sleep(TICK)
        versions = [
            (model.name, version)
            for model in registry.models.values()
            for version in model.versions.values()
        ]
        waited = [
            (name, each)
            for name, version in versions
            for each in version.workers
            if each.state is WorkerState.LOADING
        ]
        memory = await asyncio.to_thread(memory_of, [worker for _, worker in waited])
        opening = [(path.name, *at) for path, at in list(registry.opening.items())]
        tell(
            LoadStatus(
                time.monotonic() - begun,
                opening,
                [(name, worker.id, memory[worker]) for name, worker in waited],
            )
        )


async def load_all(registry: Registry, models: Sequence[StartModel]) -> list[ModelVersion]:
    """Load all concurrently, until their workers are ready; a failure ends the start."""
    versions = await _finish_all(_load(registry, model) for model in models)
    _set_defaults(registry, zip(models, versions, strict=True))
    return versions


async def _finish_all(loads: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all concurrently, and to their ends, so that one start names all that fail."""
    results = await asyncio.gather(*loads, return_exceptions=True)
    _raise_all([result for result in results if isinstance(result, BaseException)])
    return results


def _raise_all(errors: Sequence[BaseException]) -> None:
    """Raise the only error, or one with a line for each; nothing if there is none."""
    messages = [error.message for error in errors if isinstance(error, TsxError | ArchiveError)]
    if len(messages) > 1:
        raise LoadFailed("\n".join([f"{len(messages)} files cannot be served:", *messages]))
    for error in errors:
        raise error


async def register_all(registry: Registry, models: Sequence[StartModel]) -> list[ModelVersion]:
    """As in TorchServe: workers load while the server already answers; a model that cannot be
    registered is logged and skipped.
    """
    found = await asyncio.gather(*(_register_or_log(registry, model) for model in models))
    there = [
        (model, version)
        for model, version in zip(models, found, strict=True)
        if version is not None
    ]
    _set_defaults(registry, there)
    return [version for _, version in there]


async def _load(registry: Registry, model: StartModel) -> ModelVersion:
    try:
        return await _register(
            registry, replace(model, order=replace(model.order, must_load=True)), wait=True
        )
    except LoadFailed as error:  # of several models, this one
        raise error.named(model.order.url) from error


async def _register_or_log(registry: Registry, model: StartModel) -> ModelVersion | None:
    try:
        return await _register(registry, model, wait=False)
    except TsxError as error:
        logger.error("%s is not served: %s", model.order.url, error.message)
        name, version = model.order.model_name, model.order.version
        if registry.settings.model_snapshot is not None and name and version:
            registry.unloaded[name, version] = error.message
        return None


async def _register(registry: Registry, model: StartModel, *, wait: bool) -> ModelVersion:
    if model.archive is not None:
        return await registry.register_archive(model.archive, model.order, wait=wait)
    if model.path is None:
        return await registry.register(model.order, wait=wait, trust=Trust.OPERATOR)
    return await registry.register_path(model.path, model.order, wait=wait)


def _set_defaults(registry: Registry, started: Iterable[tuple[StartModel, ModelVersion]]) -> None:
    """Without this, the default would be the version whose archive was opened first."""
    described = registry.settings.model_versions
    chosen: dict[str, tuple[str, bool]] = {}
    for model, version in started:
        own = described.get(version.name, {}).get(version.version)
        explicit = model.default or (own is not None and own.default_version is True)
        if explicit or version.name not in chosen:
            chosen[version.name] = version.version, explicit
    for name, (number, explicit) in chosen.items():
        registry.traffic_manager.set_initial_default(name, number, explicit=explicit)


def models_from_settings(settings: Settings) -> list[StartModel]:
    """What `model_snapshot` describes, else what `load_models` names: `all`, or `[name=]file` in
    the model store. Raises SettingError.
    """
    if settings.model_snapshot is not None:
        saved = settings.model_snapshot.models.items()
        return [
            _restored(name, number, version, settings.model_store)
            for name, own in saved
            for number, version in own.items()
        ]
    return [
        StartModel(path, RegisterOrder(url=file, model_name=name, loaded_at_startup=True))
        for name, file, path in _named(
            settings.load_models, settings.model_store, "model_store", _looks_like_model
        )
    ]


def _named(
    entries: Sequence[str], store: Path | None, setting: str, is_one: Callable[[Path], bool]
) -> list[tuple[str | None, str, Path | None]]:
    """Name, file and path of each entry, `[name=]file` or `all` of the store. A URL has no path."""
    if [entry.lower() for entry in entries] == ["all"]:
        everything = _place("all", store, setting).parent.iterdir()
        paths = sorted(path for path in everything if is_one(path) and path.name[0] != ".")
        return [(None, path.name, path) for path in paths]
    split = map(split_name, entries)
    return [
        (name or None, file, None if is_url(file) else _place(file, store, setting))
        for name, file in split
    ]


def _place(file: str, store: Path | None, setting: str) -> Path:
    if store is None and not Path(file).is_absolute():
        raise SettingError(
            f"'{file}' cannot be found, because {setting} is not set: give the archives' directory"
        )
    return Path(file) if store is None else store / file


def _looks_like_model(path: Path) -> bool:
    """Hidden files are skipped, as in TorchServe, and the file system's own `lost+found`."""
    return (path.is_dir() or path.name.endswith(ARCHIVE_SUFFIXES)) and path.name != "lost+found"


def start_model(path: Path, name: str | None = None) -> StartModel:
    return StartModel(
        path, RegisterOrder(url=path.absolute().name, model_name=name, loaded_at_startup=True)
    )


def _restored(name: str, number: str, saved: VersionSettings, store: Path | None) -> StartModel:
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
        **{name: getattr(saved, name) for name in SAVED if saved.slo is None or name not in KNOBS},
    )
    path = None if is_url(saved.mar_name) else _place(saved.mar_name, store, "model_store")
    return StartModel(path, order, saved.default_version)


def split_name(entry: str) -> tuple[str, str]:
    """`[name=]file`, the name empty where there is none. A URL may hold a `=` of its own."""
    name, equals, file = entry.partition("=")
    return (name, file) if equals and "/" not in name else ("", entry)


@dataclass(frozen=True)
class StartWorkflow:
    """A workflow to load at the start.

    Without a path the order's URL says where it comes from, as in a registration.
    """

    path: Path | None
    order: WorkflowOrder


async def load_workflows(
    workflows: Workflows, starts: Iterable[StartWorkflow], *, or_log: bool
) -> list[Workflow]:
    """Load all concurrently.

    With `or_log`, a failure is logged and the workflow skipped; else a failure ends the start.
    """
    found = await _finish_all(_load_workflow(workflows, start, or_log) for start in starts)
    return [workflow for workflow in found if workflow is not None]


def workflows_from_settings(settings: Settings) -> list[StartWorkflow]:
    """What the setting `load_workflows` names: `all`, or `[name=]file` in the workflow store.
    Raises SettingError.
    """
    store = settings.workflow_store or settings.model_store
    return [
        StartWorkflow(path, WorkflowOrder(file, name, loaded_at_startup=True))
        for name, file, path in _named(
            settings.load_workflows,
            store,
            "workflow_store",
            lambda path: path.name.endswith(SUFFIX),
        )
    ]


def start_workflow(path: Path, name: str | None = None) -> StartWorkflow:
    return StartWorkflow(path, WorkflowOrder(path.name, name, loaded_at_startup=True))


async def _load_workflow(
    workflows: Workflows, start: StartWorkflow, or_log: bool
) -> Workflow | None:
    try:
        if start.path is None:
            workflow = await workflows.register(start.order, trust=Trust.OPERATOR)
        else:
            workflow = await workflows.register_path(start.path, start.order)
    except TsxError as error:
        if not or_log:
            raise
        logger.error("workflow %s is not served: %s", start.order.url, error.message)
        return None
    logger.info("workflow %s is loaded: POST /wfpredict/%s", workflow.name, workflow.name)
    return workflow


def warn_of_unknown_models(settings: Settings, names: Sequence[str]) -> None:
    """Log which models the settings name that are not among those served."""
    for name in dict.fromkeys(
        (*settings.models, *settings.model_versions, *settings.trust_remote_code)
    ):
        if name not in names:
            logger.warning(
                "the settings name a model %r, and none of that name is served now%s",
                name,
                suggestion(name, names),
            )


def log_privileges(settings: Settings, env: Mapping[str, str], *, platform_decides: bool) -> None:
    """`platform_decides`: whether the platform chooses the user that the server runs as."""
    if hasattr(os, "geteuid") and os.geteuid() == 0 and not platform_decides:
        logger.warning(
            "the server runs as root, and so does the code of every model; run it as a separate"
            " user (see docs/guides/security.md)"
        )
    hidden = [name for name in hidden_variables(settings, env) if name not in SERVER_SECRETS]
    if hidden:
        logger.info(
            "models cannot read these environment variables unless pass_env names them: %s",
            ", ".join(sorted(hidden)),
        )
