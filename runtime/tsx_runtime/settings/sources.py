"""One precedence for every setting: command line > environment (`TSX_*`) > `tsx.toml` or
`config.properties` > default.

`TS_*` variables count where a config.properties lets them in, before what stands in it.
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
from tsx_runtime.settings.torchserve import parse_snapshot, parse_versions, read_torchserve_config
from tsx_runtime.settings.traffic_policy import Traffic, parse_traffic
from tsx_runtime.shared.redaction import redacted
from tsx_runtime.shared.suggestions import nearest, suggestion

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_NAME = "tsx.toml"
DEPLOY = "deploy"  # the table of `tsx deploy`, which reads it by itself
ENV_PREFIX = "TSX_"
CONFIG_VARIABLE = "TSX_CONFIG"
_OF_IMAGES = re.compile(
    r"TSX_(TARGET|DEFAULTS|MODEL_DIR|MODEL_NAME|SAGEMAKER_\w+|LAMBDA_\w+)"
)  # read by `targets`
_LINK = re.compile(
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
    """The settings, and for each its origin in words. Raises `SettingError`.

    `cli` holds only what was given, by setting name; text is read as in the environment. The file
    is TOML by its name `*.toml`, any other is one of TorchServe's: what has no effect in it goes to
    `warn`. A relative path in TOML starts at the file's directory, any other at the working
    directory. `sources` has the origin, by variable, of what no variable set.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    from_file = (
        _checked(_from_toml(file, warn))
        if file is None or file.suffix == ".toml"
        else _from_properties(file, env, warn)
    )
    for found in [
        *from_file,
        *_from_environment(env, warn, sources),
        *_checked(_from_command_line(cli, warn)),
    ]:
        place, key = values, found.name
        if found.model is not None:
            place, key = (
                values.setdefault(MODELS, {}).setdefault(found.model, {}),
                found.name.rpartition(".")[2],
            )
        place[key] = _convert(found)
        origins[found.name] = found.origin
    return Settings.model_validate(values), origins


def find_config(option: Path | None, env: Mapping[str, str], directory: Path) -> Path | None:
    """The file to read: the one named on the command line, or by TSX_CONFIG, or tsx.toml in
    `directory`.
    """
    if option is not None:
        return option
    if env.get(CONFIG_VARIABLE):
        return Path(env[CONFIG_VARIABLE])
    usual = directory / CONFIG_NAME
    return usual if usual.is_file() else None


def accepted(field: FieldInfo) -> str:
    """What a setting takes, in words."""
    kind = _kind(field)
    # Of `Annotated[...] | None` the marks are inside.
    marks = (*field.metadata, *getattr(kind, "__metadata__", ()))
    for mark in marks:
        if isinstance(mark, Accepts):
            return mark.text
    unit = next((f", or {mark.text}" for mark in marks if isinstance(mark, NumberUnit)), "")
    least = next((mark.ge for mark in field.metadata if hasattr(mark, "ge")), None)
    most = next((mark.le for mark in field.metadata if hasattr(mark, "le")), None)
    if kind is bool:
        return "true or false"
    if kind is float:
        return "a number greater than 0" if least is None else f"a number from {least} to {most}"
    if unit or kind is int:
        if most is not None:
            return f"a whole number from {least} to {most}{unit}"
        return "a whole number" if least is None else f"a whole number, at least {least}{unit}"
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
    """A value as one source has it; `file` where that source is a TOML file, which has types of its
    own.
    """

    name: str
    value: object
    origin: str
    file: Path | None = None

    @property
    def model(self) -> str | None:
        """Whose setting it is, where the name is `models.MODEL.KEY`; the model's own name may hold
        dots.
        """
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
    keys, notices = read_torchserve_config(path, env, _PLAIN)
    for key in keys:
        if key.name in (MODELS, "model_snapshot"):
            is_old = key.name == MODELS
            parse: Callable[[str, str], tuple[object, list[str]]]
            parse = parse_versions if is_old else parse_snapshot
            value, more = parse(key.text, key.origin)
            yield _SourceValue("model_versions" if is_old else key.name, value, key.origin)
            notices += more
        elif _kind(Settings.model_fields[key.name]) is bool:
            yield _SourceValue(key.name, key.is_true, key.origin)
            word = key.text.strip()
            if word.lower() not in ("true", "false"):
                notices.append(
                    f"{key.origin}: {key.name} is {word!r}, which means false, as in TorchServe;"
                    " write true or false"
                )
        else:
            yield _SourceValue(key.name, key.text.strip(), key.origin)
    for notice in notices:
        warn(notice)


def _from_environment(
    env: Mapping[str, str], warn: Callable[[str], None], sources: Mapping[str, str]
) -> Iterable[_SourceValue]:
    """An unknown variable is no error: another program may set a name that begins with TSX_."""
    for variable, text in env.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if (
            not variable.startswith(ENV_PREFIX)
            or variable == CONFIG_VARIABLE
            or _is_service_link(variable, text)
        ):
            continue
        source = sources.get(variable, f"environment variable {variable}")
        if name in _PLAIN and variable == variable.upper():
            yield _SourceValue(name, text, source)
        elif not _OF_IMAGES.fullmatch(variable) and not _is_removed(name, source, warn):
            near = nearest(name, [*_PLAIN, "config"])
            hint = (
                f"did you mean {ENV_PREFIX}{near.upper()}?"
                if near
                else "`tsx config show` lists all settings"
            )
            warn(f"the {source} is no setting and is ignored; {hint}")


def _is_service_link(variable: str, text: str) -> bool:
    """Whether Kubernetes sets it in each pod beside a Service named tsx, or tsx-SOMETHING, as
    Docker did for linked containers.

    https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
    """
    return _LINK.fullmatch(variable) is not None and (
        variable.removeprefix(ENV_PREFIX).lower() not in _PLAIN or "://" in text
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
    """Return whether a setting no longer exists, after a warning: a file of an earlier release
    still starts a server.
    """
    if name in REMOVED:
        warn(f"{origin}: the setting {name} no longer exists, so it has no effect; remove it")
    return name in REMOVED


def _checked(values: Iterable[_SourceValue]) -> list[_SourceValue]:
    """Raise SettingError with a line for each unknown setting."""
    values, unknown = list(values), []
    for value in values:
        table, _, key = value.name.rpartition(".")
        if not table.startswith(f"{MODELS}."):
            table, key = "", value.name
        known = list(ModelSettings.model_fields) if table else _PLAIN
        if key not in known:
            place = f"[{table}] of " if table else ""
            place += "the command line" if value.file is None else value.origin
            hint = suggestion(key, known) or "; `tsx config show` lists all settings"
            if key in _INTENDED and not table:
                hint = f"; did you mean {_INTENDED[key]}?"
            unknown.append(f"unknown setting '{key}' in {place}{hint}")
    if unknown:
        raise SettingError("\n".join(unknown))
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


def _convert(found: _SourceValue) -> Any:
    if found.name in NESTED:
        return found.value
    field = found.field
    kind = _kind(field)
    if kind is Traffic:
        return _traffic(found)
    with_limits: Any = Annotated[field.annotation, field]
    adapter = TypeAdapter[Any](with_limits)
    try:
        if found.file is None:
            return adapter.validate_python(_from_text(found.value, kind))
        # '8' is not a number in TOML; strict JSON is what strict Python is, but takes text for a
        # path.
        value = adapter.validate_json(json.dumps(found.value, default=str), strict=True)
        return found.file.parent / value if kind is Path else value
    except ValueError as error:
        shown = "what was given" if found.name in SECRETS else redacted(repr(found.value))
        because = ""
        if isinstance(error, ValidationError) and isinstance(
            next(iter(error.errors()[0]["loc"]), None), int
        ):  # its place in a list
            because = f" because of {redacted(repr(error.errors()[0]['input']))}"
        raise SettingError(
            f"{found.name} cannot be {shown} (from {found.origin}){because}: it takes"
            f" {accepted(field)}"
        ) from error


def _traffic(found: _SourceValue) -> Traffic:
    """Has words of its own for what is wrong with it. As text, it is JSON."""
    try:
        return parse_traffic(
            json.loads(found.value) if isinstance(found.value, str) else found.value
        )
    except ValueError as error:
        raise SettingError(f"{found.name} (from {found.origin}): {error}") from error


def _from_text(value: object, kind: Any) -> object:
    """What a variable or `--set NAME=TEXT` means: commas part a list, unless it is JSON, and no
    path is empty.
    """
    if not isinstance(value, str):
        return value
    if typing.get_origin(kind) is Annotated:  # of `Annotated[...] | None` the marks are inside
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
    """The field's type without its `None`."""
    if typing.get_origin(field.annotation) in (typing.Union, types.UnionType):
        return next(kind for kind in typing.get_args(field.annotation) if kind is not type(None))
    return field.annotation


_PLAIN = [name for name in Settings.model_fields if name not in NESTED]
_INTENDED = {
    name: f"{MODELS}.NAME.{BY_KEY.get(name, name)}"
    for name in (*ModelSettings.model_fields, *BY_KEY)
}
for _name in ("workers", "batch_size", "device"):
    _INTENDED[_name] += f", or --{_name.replace('_', '-')} of tsx serve"
_INTENDED |= {
    "log_level": "log_config",
    "timeout": "default_response_timeout",
    "model": MODELS,
    "port": "inference_address",
}
