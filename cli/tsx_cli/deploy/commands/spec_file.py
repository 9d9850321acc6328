"""The reading of a deployment's specification from options and tsx.toml.

Options override `[deploy.NAME]`, which overrides `[deploy]`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from tsx_archiver import default_model_name
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.deploy.spec_values import MAX_NAME_CHARS, SpecSection
from tsx_cli.deploy.targets import find_target
from tsx_runtime.settings.sources import CONFIG_NAME
from tsx_runtime.shared.suggestions import suggestion

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_named_spec(file: Path | None, options: Mapping[str, Any]) -> DeploySpec:
    """Read only the name, the target and the location, for verbs that need no model.

    Other keys have their defaults.

    Raises:
        UsageError: The specification is incomplete or invalid.
        CliError: tsx.toml is invalid.
    """
    values = _values(file, options)
    for key in ("name", "target"):
        if not isinstance(values.get(key), str):
            raise UsageError(f"{key} is not given: --{key}, or {key} under [deploy] in tsx.toml")
    fields: Any = DeploySpec.model_fields
    with _describe_problems():
        sections = {
            key: fields[key].annotation.model_validate(values.get(key, {}))
            for key in ("build", "sagemaker", "container", "kubernetes", "ray")
        }
    sections |= {
        key: values.get(key) for key in ("name", "target", "region", "profile", "repository")
    }
    return DeploySpec.model_construct(**sections)


def read_target(file: Path | None, options: Mapping[str, Any]) -> str | None:
    """Return the target, or None if neither an option nor tsx.toml gives it."""
    target = _values(file, options).get("target")
    return target if isinstance(target, str) else None


def read_spec(file: Path | None, options: Mapping[str, Any]) -> DeploySpec:
    """Read a specification; the option `role` belongs to the table of the target.

    Raises:
        UsageError: The specification is incomplete or invalid.
        CliError: tsx.toml is invalid.
    """
    with _describe_problems():
        spec = DeploySpec.model_validate(_values(file, options))
    find_target(spec.target).check(spec)
    return spec


def _values(file: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    tables = _tables(file)
    common = {key: value for key, value in tables.items() if not _is_deployment(key, value)}
    options = {key: value for key, value in options.items() if value is not None}
    name = (
        options.get("name")
        or common.get("name")
        or _derive_name(options.get("model") or common.get("model"))
    )
    if name is not None:
        options["name"] = name
    values = _merge(
        _merge(common, tables.get(str(name), {})),
        {key: value for key, value in options.items() if key != "role"},
    )
    return (
        values
        if options.get("role") is None
        else _merge(values, {str(values.get("target")): {"role": options["role"]}})
    )


def _derive_name(model: object) -> str | None:
    """Derive a deployment's name from the file name of an archive."""
    if not isinstance(model, str | Path):
        return None
    name = "-".join(re.findall(r"[a-z0-9]+", default_model_name(model).lower()))
    return name[:MAX_NAME_CHARS].rstrip("-") or None


def _tables(file: Path | None) -> dict[str, Any]:
    """Return `[deploy]` of the given file, or of the working directory's tsx.toml if it exists.

    Raises:
        UsageError: A table has an unknown key.
        CliError: The file is not valid TOML.
    """
    if file is None:
        file = Path(CONFIG_NAME)
        if not file.exists():
            return {}
    try:
        content = tomllib.loads(file.read_text()).get("deploy", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CliError(f"{file} is not valid TOML: {error}") from error
    if not isinstance(content, dict):
        raise CliError(f"{file}: deploy is a table, [deploy]")
    tables = _fields(DeploySpec)
    for name, value in content.items():
        unknown = sorted(value.keys() - tables) if _is_deployment(name, value) else []
        if unknown:  # The table may be misspelled instead of a deployment.
            raise UsageError(
                f"{file}: [deploy.{name}] is no table of tsx, nor a deployment, which has no"
                f" '{unknown[0]}'{suggestion(name, tables)}"
            )
    return content


def _is_deployment(key: str, value: object) -> bool:
    return isinstance(value, dict) and key not in _fields(DeploySpec)


def _merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        merged[key] = (
            _merge(base[key], value)
            if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
            else value
        )
    return merged


@contextmanager
def _describe_problems() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise UsageError("; ".join(map(_describe_problem, error.errors()))) from error


def _describe_problem(problem: Mapping[str, Any]) -> str:
    key_path = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return (
            "deploy has no key"
            f" '{key_path}'{suggestion(str(problem['loc'][-1]), _known_keys(problem['loc'][:-1]))}"
        )
    if problem["type"] == "missing":
        return (
            f"{key_path} is not given: --{key_path.replace('_', '-')}, or {key_path} under [deploy]"
            " in tsx.toml"
        )
    if problem["type"] == "model_type":
        return (
            f"{key_path} has keys of its own, not a value:"
            f" {', '.join(f'{key_path}.{key}' for key in _known_keys(problem['loc']))}"
        )
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{key_path}: {message}" + (
        "" if isinstance(problem["input"], Mapping) else f" (it is {problem['input']!r})"
    )


def _known_keys(path: tuple[Any, ...]) -> list[str]:
    model: Any = DeploySpec
    for key in path:
        field = next(
            (field for name, field in model.model_fields.items() if key in (name, field.alias)),
            None,
        )
        types = (
            []
            if field is None
            else [
                kind
                for kind in (field.annotation, *get_args(field.annotation))
                if isinstance(kind, type)
            ]
        )
        model = next((kind for kind in types if issubclass(kind, SpecSection)), None)
        if model is None:
            return []
    return _fields(model)


def _fields(model: type[SpecSection]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]
