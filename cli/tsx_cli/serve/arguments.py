"""The arguments of `tsx serve`, which name the models and workflows that it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tsx_archiver.inspecting import manifest_of
from tsx_archiver.names import similar_file
from tsx_cli.archive.directory import directory_of
from tsx_cli.archive.huggingface import HuggingFaceOptions, huggingface_spec
from tsx_cli.archive.mlflow import mlflow_spec
from tsx_cli.archive.model_file import HandlerFiles, infer_spec
from tsx_cli.archive.python_files.models import one_model_each
from tsx_cli.archive.python_files.spec import python_file_spec, watched_files
from tsx_cli.archive.source import SourceKind, classify
from tsx_cli.archive.trust import TrustOptions
from tsx_cli.common.failure import CliError, UsageError, for_all
from tsx_cli.serve.server import run_server
from tsx_runtime.core.placement.hardware import gpu_count
from tsx_runtime.errors import Conflict
from tsx_runtime.feature import StartItem, start_items
from tsx_runtime.server.server import ServeOptions
from tsx_runtime.server.startup import StartModel, models_from_settings, start_model
from tsx_runtime.settings.schema import Settings

NO_HUGGINGFACE_OPTIONS = HuggingFaceOptions()


def serve_arguments(
    arguments: Sequence[str],
    settings: Settings,
    parts: HandlerFiles,
    registration_options: Mapping[str, object],
    huggingface: HuggingFaceOptions,
    *,
    trust: TrustOptions,
    replaces: bool,
    reload: bool,
) -> None:
    """Serve the given files and directories, or those in the settings.

    Args:
        arguments: `[NAME=]FILE` arguments.
        settings: The settings.
        parts: The handler and files of bare models.
        registration_options: Parameters of each registration; None means that one is not set.
        huggingface: The options of Hugging Face models.
        trust: The kinds of code that may run in the models.
        replaces: Whether to take over the addresses of a running server.
        reload: Whether to load a model again when its files change.
    """
    if registration_options.get("device_type") == "gpu" and not gpu_count():
        raise UsageError(
            "--device gpu: no GPU is visible here (`nvidia-smi` shows what the driver sees); omit"
            " --device to run on the CPU"
        )
    located = for_all(arguments, lambda argument: locate(argument, settings), CliError)
    sources = [model for source in located for model in _one_model_each(source)]
    model_sources = [source for source in sources if source.kind != "workflow"]
    kinds = {source.kind for source in model_sources}
    is_code_given = parts.handler is not None or parts.model_file is not None
    if (is_code_given and "file" not in kinds) or (
        parts.is_given and not kinds & {"file", "Python"}
    ):
        raise UsageError(
            "--handler, --model-file and --extra-files apply to bare model files; archives and"
            " directories have their own, and a Python file takes only --extra-files"
        )
    if huggingface.packing_options and kinds != {"Hugging Face"}:
        raise UsageError(
            f"{huggingface.packing_options}: only directories of Hugging Face models, and models of the Hub,"
            " take that; remove it"
        )
    if any(trust) and not model_sources:
        raise UsageError(
            "--trust-remote-code and --trust-pickle are for the models that are named; for others,"
            " name them in the settings trust_remote_code and trust_pickle"
        )
    if reload and (not sources or len(model_sources) < len(sources)):
        raise UsageError(
            "--reload watches the files of the models that are named; name them, and no workflow"
        )
    options = ServeOptions(replace=replaces)
    with ExitStack() as stack:
        builds = [
            partial(
                find_model,
                source,
                parts,
                huggingface=huggingface,
                # The setting of an optional feature.
                installs_packages=getattr(settings, "install_py_dep_per_model", False),
            )
            for source in model_sources
        ]
        if reload:
            from tsx_cli.serve.reload import ReloadedModel, reloading  # its import takes a while

            models = [ReloadedModel(build, stack) for build in builds]
            starts = [model.start for model in models]
            options = replace(options, accepting=partial(reloading, models))
        else:
            starts = [build(stack) for build in builds] or models_from_settings(settings)
        if any(trust):
            names = [
                start.order.model_name or manifest_of(start.path).model_name
                for start in starts
                if start.path is not None
            ]
            settings = trust.apply(settings, names)
        given_workflows = [
            start_workflow(path, name) for name, path, kind in sources if kind == "workflow"
        ]
        orders: dict[str, Any] = {
            name: value for name, value in registration_options.items() if value is not None
        }
        if orders and given_workflows and not starts:
            raise UsageError(
                "--workers, --batch-size and --device apply to models; a workflow's specification"
                " sets them for its models"
            )
        try:
            run_server(
                settings,
                [replace(start, order=replace(start.order, **orders)) for start in starts],
                given_workflows or start_items(settings),
                options=options,
            )
        except Conflict as error:
            raise CliError(
                f"{error.message.rstrip('.')}; give each file its own name, as NAME=FILE"
            ) from error


class LocatedSource(NamedTuple):
    """The model or workflow of a `[NAME=]FILE` argument."""

    name: str | None
    path: Path
    kind: SourceKind


def _one_model_each(source: LocatedSource) -> list[LocatedSource]:
    if source.kind != "Python":
        return [source]
    paths = one_model_each(source.path)
    if source.name is not None and len(paths) > 1:
        raise UsageError(
            f"{source.path} has several models; name each, as {source.name}={paths[0]}"
        )
    return [source._replace(path=path) for path in paths]


def start_workflow(path: Path, name: str | None) -> StartItem:
    from tsx_runtime.features.workflows.feature import WorkflowsFeature  # an optional feature

    return StartItem(WorkflowsFeature, path, path.name, name)


def find_model(
    source: LocatedSource,
    parts: HandlerFiles,
    stack: ExitStack,
    huggingface: HuggingFaceOptions = NO_HUGGINGFACE_OPTIONS,
    *,
    installs_packages: bool = False,
    quiet: bool = False,
) -> StartModel:
    """Return how a source is served.

    For a model without an archive, a temporary directory like an unpacked archive is made. `stack`
    removes it. Unless `quiet`, notes on the model are printed. `installs_packages` tells whether
    the server installs requirements of models.
    """
    name, path, kind = source
    watched = [path]
    if kind in ("archive", "directory"):
        return replace(start_model(path, name), files=(path,))
    if kind == "Hugging Face":
        spec, notes = huggingface_spec(path, huggingface, name, None, None)
    elif kind == "MLflow":
        spec, notes = stack.enter_context(
            mlflow_spec(path, name, None, None, None, requirements=True)
        )
    elif kind == "Python":
        watched = watched_files(path)
        spec, notes = stack.enter_context(
            python_file_spec(
                path, name, extra_files=parts.extra_files, requirements=installs_packages
            )
        )
    else:
        spec, notes = infer_spec(path, parts, name=name)
    if not quiet:
        print("\n".join(notes), flush=True)
    directory, files = stack.enter_context(directory_of(spec))
    start = start_model(directory, name)
    origins = (entry for entry in spec.extra_manifest.values() if "source" in entry)
    facts = next(origins, {"source": path.name})
    url = "@".join(facts[key] for key in ("source", "revision") if key in facts)
    return replace(
        start,
        order=replace(start.order, url=url),
        files=(*watched, *map(Path, parts.extra_files), *files),
    )


def locate(argument: str, settings: Settings) -> LocatedSource:
    """Find `[NAME=]FILE` in the working directory or in a store.

    A directory that is not a model does not hide a store's file. If a store's file is hidden, this
    is printed.
    """
    name, path = _split(argument)
    kind = classify(path)
    store_name, store = "model store", settings.model_store
    if kind == "workflow":
        from tsx_runtime.features.workflows.feature import WorkflowsFeature  # an optional feature

        store = WorkflowsFeature.store_of(settings)
        store_name = "model store" if store is settings.model_store else "workflow store"
    candidates = () if store is None else (store / path, store / f"{path}.mar")
    stored = next((file for file in candidates if file.exists()), None)
    if kind in ("Hugging Face", "MLflow", "Python") or (
        path.exists() and (stored is None or kind != "directory")
    ):
        if stored is not None and stored.resolve() != path.resolve():
            print(
                f"'{path}' is that of the working directory, not '{stored}' of the {store_name}",
                flush=True,
            )
        return LocatedSource(name, path, kind)
    if stored is not None:
        return LocatedSource(name, stored, classify(stored))
    store_text = f", nor in the {store_name} '{store}'" if store else ""
    packed = path.with_name(f"{path.name}.mar")
    suggestion_text = f"; did you mean '{packed}'?" if packed.is_file() else similar_file(path)
    suggestion_text = suggestion_text or (similar_file(store / path) if store else "")
    raise CliError(
        f"there is no file '{path}'{store_text}{suggestion_text or ';'} name an archive, a model directory or a"
        " model file"
    )


def _split(argument: str) -> tuple[str | None, Path]:
    name, equals, file = argument.partition("=")
    if Path(argument).exists() or not (equals and name and file):
        return None, Path(argument)
    return name, Path(file)
