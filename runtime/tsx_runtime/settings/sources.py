"""The sources of settings and their precedence.

Command line > environment (`TSX_*`) > `tsx.toml` or `config.properties` > default. A
config.properties may allow `TS_*` variables, which then override the content of that file.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tsx_archiver.metadata.model_limits import BY_KEY
from tsx_runtime.errors import SettingError
from tsx_runtime.settings.model_limits import Accepts, NumberUnit
from tsx_runtime.settings.schema import MODELS, NESTED, REMOVED, SECRETS, ModelSettings, Settings
from tsx_runtime.settings.torchserve import (
    PROTECTION,
    parse_snapshot,
    parse_versions,
    read_torchserve_config,
)
from tsx_runtime.settings.traffic_policy import Traffic, parse_traffic
from tsx_runtime.shared.redaction import redacted
from tsx_runtime.shared.suggestions import nearest, suggestion

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_NAME = "tsx.toml"
DEPLOY = "deploy"  # the table that only `tsx deploy` reads
ENV_PREFIX = "TSX_"
CONFIG_VARIABLE = "TSX_CONFIG"
# Variables that are not settings: `tsx_runtime.targets` reads them.
_IMAGE_VARIABLE = re.compile(r"TSX_(TARGET|DEFAULTS|MODEL_DIR|MODEL_NAME|SAGEMAKER_\w+|LAMBDA_\w+)")
_SERVICE_LINK = re.compile(
    r"TSX_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)

logger = logging.getLogger("tsx.settings")


def load_settings(
    cli: Mapping[str, object],
    env: Mapping[str, str],
    file: Path | None = None,
    warn: Callable[[str], None] = logger.warning,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Settings, dict[str, str]]:
    """Return the settings, and a description of each one's origin.

    A relative path in a TOML file refers to the file's directory, any other to the working
    directory.

    Args:
        cli: The options of the command line, by setting name; text is parsed like a variable.
        env: The environment.
        file: A TOML file if its name ends in `.toml`, or a config.properties.
        warn: Called with a notice about each value without effect.
        sources: The origins of variables in `env` that do not come from the environment.

    Raises:
        SettingError: A setting is unknown, or its value cannot be used.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    file_values = (
        _check_names(_from_toml(file, warn))
        if file is None or file.suffix == ".toml"
        else _from_properties(file, env, warn)
    )
    for item in [
        *file_values,
        *_from_environment(env, warn, sources),
        *_check_names(_from_command_line(cli, warn)),
    ]:
        table, key = values, item.name
        if item.model is not None:
            table = values.setdefault(MODELS, {}).setdefault(item.model, {})
            key = item.name.rpartition(".")[2]
        table[key] = _convert(item)
        origins[item.name] = item.origin
    return Settings.model_validate(values), origins


def find_config(option: Path | None, env: Mapping[str, str], directory: Path) -> Path | None:
    """Return the configuration file: `option`, or TSX_CONFIG, or tsx.toml in `directory`."""
    if option is not None:
        return option
    if env.get(CONFIG_VARIABLE):
        return Path(env[CONFIG_VARIABLE])
    default = directory / CONFIG_NAME
    return default if default.is_file() else None


def accepted(field: FieldInfo) -> str:
    """Describe the values that a setting takes."""
    kind = _kind(field)
    # For `Annotated[...] | None`, pydantic leaves the annotations inside the type.
    annotations = (*field.metadata, *getattr(kind, "__metadata__", ()))
    for annotation in annotations:
        if isinstance(annotation, Accepts):
            return annotation.text
    unit_text = next(
        (
            f", or {annotation.text}"
            for annotation in annotations
            if isinstance(annotation, NumberUnit)
        ),
        "",
    )
    minimum = next(
        (annotation.ge for annotation in field.metadata if hasattr(annotation, "ge")), None
    )
    maximum = next(
        (annotation.le for annotation in field.metadata if hasattr(annotation, "le")), None
    )
    if kind is bool:
        return "true or false"
    if kind is float:
        return (
            "a number greater than 0"
            if minimum is None
            else f"a number from {minimum} to {maximum}"
        )
    if unit_text or kind is int:
        if maximum is not None:
            return f"a whole number from {minimum} to {maximum}{unit_text}"
        return (
            "a whole number"
            if minimum is None
            else f"a whole number, at least {minimum}{unit_text}"
        )
    if kind is Path:
        return "a path"
    if typing.get_origin(kind) is Literal:
        return " or ".join(typing.get_args(kind))
    return (
        "a list, or a string with commas"
        if typing.get_origin(kind) is list
        else "text, at least one character"
    )


class _SourceValue(NamedTuple):
    """The value of a setting in one source.

    `file` is set only for a TOML file, whose values have types; all other sources have texts.
    """

    name: str
    value: object
    origin: str
    file: Path | None = None

    @property
    def model(self) -> str | None:
        """The model in a name of the form `models.MODEL.KEY`; a model's name may contain dots."""
        return self.name.partition(".")[2].rpartition(".")[0] if "." in self.name else None

    @property
    def field(self) -> FieldInfo:
        fields = Settings.model_fields if self.model is None else ModelSettings.model_fields
        return fields[self.name.rpartition(".")[2]]


def _from_toml(path: Path | None, warn: Callable[[str], None]) -> Iterable[_SourceValue]:
    if path is not None:
        for name, value in _read_toml(path).items():
            if name == MODELS:
                yield from _from_model_tables(value, path)
            elif name != DEPLOY and not _is_removed(name, str(path), warn):
                yield _SourceValue(name, value, str(path), path)


def _from_model_tables(tables: object, path: Path) -> Iterable[_SourceValue]:
    for model, table in (tables if isinstance(tables, dict) else {"": tables}).items():
        if not isinstance(table, dict):
            raise SettingError(
                f"{MODELS} in {path} takes one table per model, as in [{MODELS}.resnet];"
                f" '{model or table}' is not a table"
            )
        for key, value in table.items():
            yield _SourceValue(
                f"{MODELS}.{model}.{BY_KEY.get(str(key), str(key))}", value, str(path), path
            )


def _from_properties(
    path: Path, env: Mapping[str, str], warn: Callable[[str], None]
) -> Iterable[_SourceValue]:
    keys, notices = read_torchserve_config(path, env, _PLAIN_NAMES)
    for key in keys:
        if key.name in (MODELS, "model_snapshot"):
            is_versions = key.name == MODELS
            parse: Callable[[str, str], tuple[object, list[str]]]
            parse = parse_versions if is_versions else parse_snapshot
            value, extra_notices = parse(key.text, key.origin)
            yield _SourceValue("model_versions" if is_versions else key.name, value, key.origin)
            notices += extra_notices
        elif _kind(Settings.model_fields[key.name]) is bool:
            yield _SourceValue(key.name, key.is_true, key.origin)
            text = key.text.strip()
            if text.lower() not in ("true", "false"):
                notices.append(
                    f"{key.origin}: {key.name} is {text!r}, which means false, as in TorchServe;"
                    " write true or false"
                )
        else:
            yield _SourceValue(key.name, key.text.strip(), key.origin)
    for notice in notices:
        warn(notice)


def _from_environment(
    env: Mapping[str, str], warn: Callable[[str], None], sources: Mapping[str, str]
) -> Iterable[_SourceValue]:
    """Yield the settings of the environment, and warn about unknown variables.

    An unknown variable is not an error, since other programs may use names that begin with TSX_.
    """
    for variable, text in env.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if (
            not variable.startswith(ENV_PREFIX)
            or variable == CONFIG_VARIABLE
            or _is_service_link(variable, text)
        ):
            continue
        source = sources.get(variable, f"environment variable {variable}")
        if name in _PLAIN_NAMES and variable == variable.upper():
            yield _SourceValue(name, text, source)
        elif not _IMAGE_VARIABLE.fullmatch(variable) and not _is_removed(name, source, warn):
            nearest_name = nearest(name, [*_PLAIN_NAMES, "config"])
            hint = (
                f"did you mean {ENV_PREFIX}{nearest_name.upper()}?"
                if nearest_name
                else "`tsx config show` lists all settings"
            )
            if name == PROTECTION:
                raise SettingError(f"unknown setting '{name}' in the {source}; {hint}")
            warn(f"the {source} is no setting and is ignored; {hint}")


def _is_service_link(variable: str, text: str) -> bool:
    """Tell whether Kubernetes or Docker set a variable for a service named tsx or tsx-SOMETHING.

    https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
    """
    return _SERVICE_LINK.fullmatch(variable) is not None and (
        variable.removeprefix(ENV_PREFIX).lower() not in _PLAIN_NAMES or "://" in text
    )


def _from_command_line(
    cli: Mapping[str, object], warn: Callable[[str], None]
) -> Iterable[_SourceValue]:
    for name, value in cli.items():
        if _is_removed(name, "the command line", warn):
            continue
        table, dot, key = name.rpartition(".")
        yield _SourceValue(
            f"{table}.{BY_KEY.get(key, key)}" if dot else name, value, "command line"
        )


def _is_removed(name: str, origin: str, warn: Callable[[str], None]) -> bool:
    """Tell whether a setting was removed, and warn about it.

    A removed setting is not an error, so that a file of an earlier release still works.
    """
    if name in REMOVED:
        warn(f"{origin}: the setting {name} no longer exists, so it has no effect; remove it")
    return name in REMOVED


def _check_names(values: Iterable[_SourceValue]) -> list[_SourceValue]:
    """Refuse unknown settings.

    Raises:
        SettingError: There are unknown settings; the message has a line for each.
    """
    values, problems = list(values), []
    for value in values:
        table, _, key = value.name.rpartition(".")
        if not table.startswith(f"{MODELS}."):
            table, key = "", value.name
        known_names = list(ModelSettings.model_fields) if table else _PLAIN_NAMES
        if key not in known_names:
            location = f"[{table}] of " if table else ""
            location += "the command line" if value.file is None else value.origin
            hint = suggestion(key, known_names) or "; `tsx config show` lists all settings"
            if key in _ALTERNATIVES and not table:
                hint = f"; did you mean {_ALTERNATIVES[key]}?"
            problems.append(f"unknown setting '{key}' in {location}{hint}")
    if problems:
        raise SettingError("\n".join(problems))
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data: dict[str, Any] = tomllib.load(file)
            return data
    except OSError as error:
        raise SettingError(
            f"cannot read the configuration file '{path}': {error.strerror}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"'{path}' is not valid TOML: {error}") from error


def _convert(item: _SourceValue) -> Any:
    if item.name in NESTED:
        return item.value
    field = item.field
    kind = _kind(field)
    if kind is Traffic:
        return _convert_traffic(item)
    annotated_type: Any = Annotated[field.annotation, field]
    adapter = TypeAdapter[Any](annotated_type)
    try:
        if item.file is None:
            return adapter.validate_python(_from_text(item.value, kind))
        # Strict mode refuses the text '8' for a number. Strict JSON, unlike strict Python, accepts
        # a text for a path.
        value = adapter.validate_json(json.dumps(item.value, default=str), strict=True)
        return item.file.parent / value if kind is Path else value
    except ValueError as error:
        value_text = "what was given" if item.name in SECRETS else redacted(repr(item.value))
        cause = ""
        if isinstance(error, ValidationError) and isinstance(
            next(iter(error.errors()[0]["loc"]), None), int
        ):  # The first item of `loc` is the index in a list.
            cause = f" because of {redacted(repr(error.errors()[0]['input']))}"
        raise SettingError(
            f"{item.name} cannot be {value_text} (from {item.origin}){cause}: it takes"
            f" {accepted(field)}"
        ) from error


def _convert_traffic(item: _SourceValue) -> Traffic:
    """Parse a traffic policy; text is read as JSON."""
    try:
        return parse_traffic(json.loads(item.value) if isinstance(item.value, str) else item.value)
    except ValueError as error:
        raise SettingError(f"{item.name} (from {item.origin}): {error}") from error


def _from_text(value: object, kind: Any) -> object:
    """Parse the text of a variable or of `--set NAME=TEXT`.

    A list is JSON, or items that are separated by commas. An empty path is refused.
    """
    if not isinstance(value, str):
        return value
    # The type of `Annotated[...] | None` is still annotated.
    if typing.get_origin(kind) is Annotated:
        kind = kind.__origin__
    if typing.get_origin(kind) is list:
        with suppress(ValueError):
            if isinstance(items := json.loads(value), list):
                return items
        return [part.strip() for part in value.split(",") if part.strip()]
    if kind is Path and not value:
        raise ValueError("an empty path")
    return value


def _kind(field: FieldInfo) -> Any:
    """Return the type of a field without its `None`."""
    if typing.get_origin(field.annotation) in (typing.Union, types.UnionType):
        return next(kind for kind in typing.get_args(field.annotation) if kind is not type(None))
    return field.annotation


_PLAIN_NAMES = [name for name in Settings.model_fields if name not in NESTED]
_ALTERNATIVES = {
    name: f"{MODELS}.NAME.{BY_KEY.get(name, name)}"
    for name in (*ModelSettings.model_fields, *BY_KEY)
}
for _name in ("workers", "batch_size", "device"):
    _ALTERNATIVES[_name] += f", or --{_name.replace('_', '-')} of tsx serve"
_ALTERNATIVES |= {
    "log_level": "log_config",
    "timeout": "default_response_timeout",
    "model": MODELS,
    "port": "inference_address",
}
