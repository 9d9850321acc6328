"""Specs of archives for Python files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tsx_archiver import DEFAULT_VERSION, ArchiveSpec, load_yaml_file, parse_model_config
from tsx_archiver.opening import DEFAULT_CONFIG
from tsx_archiver.packing import extra_paths, files_below
from tsx_archiver.python_file import HANDLER, LITSERVE, METHOD, PythonFileFacts
from tsx_archiver.storage.private_directory import scratch_directory
from tsx_cli.archive.python_files.code import (
    REQUIREMENTS,
    find_data_files,
    find_imports,
    installed_requirements,
    read_script_block,
)
from tsx_cli.archive.python_files.litserve import NOT_LITSERVE
from tsx_cli.archive.python_files.models import (
    PythonModel,
    find_models,
    setting_key,
    split_target,
)
from tsx_cli.common.failure import CliError


def watched_files(path: Path) -> list[Path]:
    """Return the file, and files beside it that would change its model if they were added."""
    file, _ = split_target(path)
    _, modules = find_imports(file)
    names = [DEFAULT_CONFIG, *(f"{module}.py" for module in modules)]
    return [file, *(file.parent / name for name in names)]


@contextmanager
def python_file_spec(
    path: Path,
    name: str | None = None,
    version: str | None = None,
    extra_files: Sequence[str] = (),
    config_file: Path | None = None,
    *,
    requirements: bool = True,
) -> Iterator[tuple[ArchiveSpec, list[str]]]:
    """Yield the spec of an archive, and notes; its files exist until the context ends.

    Args:
        path: FILE or FILE:NAME.
        name: The name of the model.
        version: The version of the model.
        extra_files: Further files; those below the folder of the file keep their paths.
        config_file: A model-config.yaml, in place of the one beside the file.
        requirements: Whether to pack the requirements of the file.

    Raises:
        CliError: The file, or a file that it imports, cannot be used.
    """
    file, _ = split_target(path)
    model = _find_model(path)
    script = read_script_block(file)
    code, packages = find_imports(file)
    members, other_files = _collect_members(file, code, extra_files)
    config = _merge_settings(file, config_file, script, model)
    needed = script.get("dependencies") if requirements else []
    needed = installed_requirements(packages) if needed is None else needed
    name, version = name or model.name, version or DEFAULT_VERSION
    call = "batches of requests" if model.is_batched else "one request a call"
    call += ", asynchronous" if model.is_async else ""
    notes = [f"{file}: {model.target} is the model {name}, version {version}; {call}"]
    if unused := model.litserve.unused:
        notes.append(f"note: LitServer's {', '.join(unused)} have no effect")
    notes += [f"files {', '.join(sorted(members))}"] if len(members) > 1 else []
    notes += [f"settings {json.dumps(config)}"] if config else []
    notes += [f"requirements {', '.join(needed)}"] if needed else []
    facts = PythonFileFacts(
        file.name, model.target, model.is_batched, model.is_async, model.litserve.attributes
    )
    with scratch_directory("tsx-python-") as folder:
        config_path, requirements_path = folder / DEFAULT_CONFIG, folder / REQUIREMENTS
        config_path.write_text(yaml.safe_dump(config))
        requirements_path.write_text("".join(f"{line}\n" for line in needed))
        yield (
            ArchiveSpec(
                model_name=name,
                version=version,
                handler=HANDLER if model.litserve is NOT_LITSERVE else LITSERVE,
                files=members,
                extra_files=other_files,
                config_file=config_path if config else None,
                requirements_file=requirements_path if needed else None,
                extra_manifest=facts.as_manifest(),
            ),
            notes,
        )


def _find_model(path: Path) -> PythonModel:
    """Return the only model of FILE or FILE:NAME."""
    models = find_models(path)
    if len(models) == 1:
        return models[0]
    file, _ = split_target(path)
    if not models:
        raise CliError(
            f"{file} has no class with a method {METHOD}, and no function {METHOD}; add one"
        )
    names = ", ".join(model.target for model in models)
    raise CliError(f"{file} has several models, {names}: name one, as {file}:{models[0].target}")


def _collect_members(
    file: Path, code: Sequence[Path], extra_files: Sequence[str]
) -> tuple[dict[str, Path], list[Path]]:
    """Return the files by their paths in the archive, and extra files from other folders."""
    sources = [path for path in code if path.suffix == ".py"]
    data = [path for module in sources for path in find_data_files(module, file.parent)]
    members = {path.relative_to(file.parent).as_posix(): path for path in [*code, *data]}
    folder, other_files = file.parent.resolve(), list[Path]()
    for extra in extra_paths(extra_files, None):
        path = extra.parent.resolve() / extra.name
        if not path.is_relative_to(folder):
            other_files.append(extra)
            continue
        for member in files_below(path) if path.is_dir() else [path]:
            members[member.relative_to(folder).as_posix()] = member
    return members, other_files


def _merge_settings(
    file: Path, config_file: Path | None, script: Mapping[str, Any], model: PythonModel
) -> dict[str, Any]:
    """Merge LitServe's arguments, model-config.yaml, `[tool.tsx]`, and a class's attributes."""
    beside = file.parent / DEFAULT_CONFIG
    path = config_file or (beside if beside.is_file() else None)
    config = {} if path is None else load_yaml_file(path) or {}
    tool = script.get("tool", {})
    table = tool.get("tsx", {}) if isinstance(tool, dict) else tool
    for mapping in (config, table):
        if not isinstance(mapping, dict):
            raise CliError(f"the settings of {file} must have keys, such as batchSize: {mapping!r}")
    inline = {setting_key(key) or key: value for key, value in table.items()}
    defaults = model.litserve.settings
    merged = {**defaults, **config, **inline, **model.settings}
    arguments = merged.get("init_args") or {}
    if "init_args" in defaults and isinstance(arguments, dict):
        merged["init_args"] = defaults["init_args"] | arguments
    _, problems = parse_model_config(merged)
    if problems:
        raise CliError(
            f"the settings of {model.target} in {file} cannot be used: {'; '.join(problems)}"
        )
    if unknown := set(model.litserve.unknown) - set(merged.get("init_args") or ()):
        raise CliError(
            f"{model.target}: {', '.join(sorted(unknown))} must be written out where it is"
            " constructed, since that code does not run; or set init_args in model-config.yaml"
        )
    return merged
