"""The settings of a container, from its environment variables and the layout of its model
directory.

    TSX_MODEL_DIR     where the model lies, /opt/ml/model if not set; KServe puts it into /mnt/models
    TSX_MODEL_NAME    what the one model is called, in place of its archive's own name
    TSX_DEFAULTS      settings that a deployment derives, as NAME=VALUE separated by spaces; the user's variables and file override them

A directory that holds `model-store` is laid out as KServe's TorchServe runtime has it: archives
there, and config/config.properties.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tsx_runtime.errors import SettingError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.sources import load_settings
from tsx_runtime.shared.suggestions import suggestion

TARGET = "TSX_TARGET"  # set by the image, read by its entry point
RUNTIME_API = "AWS_LAMBDA_RUNTIME_API"  # host and port; set on Lambda only
MODEL_DIR, MODEL_NAME = "TSX_MODEL_DIR", "TSX_MODEL_NAME"
GIVEN_DEFAULTS = "TSX_DEFAULTS"
USUAL = Path("/opt/ml/model")
# overridden by any setting of the user: clients reach a container by its own address only
DEFAULTS = {
    "inference_address": "http://0.0.0.0:8080",
    "management_address": "http://127.0.0.1:8081",  # not reachable from outside
    "metrics_address": "http://0.0.0.0:8082",
    # a load balancer or an ingress in front has one address for all clients
    "max_connections_per_client": "0",
    "max_requests_per_client": "0",
}


class ModelLocation(NamedTuple):
    directory: Path
    name: str | None  # of the model
    store: Path | None = None  # of KServe's TorchServe layout
    config: Path | None = None  # the settings file found there


def locate_model(env: Mapping[str, str]) -> ModelLocation:
    directory = Path(env.get(MODEL_DIR) or USUAL)
    store = directory / "model-store"
    if not store.is_dir():
        return ModelLocation(directory, env.get(MODEL_NAME) or None)
    config = directory / "config" / "config.properties"
    return ModelLocation(directory, None, store, config if config.is_file() else None)


def settings_of(
    env: Mapping[str, str], place: ModelLocation, file: Path | None, notices: list[str]
) -> Settings:
    """Raises SettingError."""
    given, defaults = dict(env), {f"TSX_{name.upper()}": value for name, value in DEFAULTS.items()}
    if place.store is not None:
        given.setdefault(
            "TSX_MODEL_STORE", str(place.store)
        )  # overrides that of the file, which was written on another machine
        defaults["TSX_LOAD_MODELS"] = "all"
    return settings_over(defaults, given, file or place.config, notices.append)


def settings_over(
    defaults: Mapping[str, str],
    env: Mapping[str, str],
    file: Path | None,
    warn: Callable[[str], None],
) -> Settings:
    """The settings of a user's variables and file; `defaults`, as variables, count where neither
    sets one. Raises SettingError.
    """
    _, origins = load_settings({}, env, file, lambda notice: None)
    derived = _given_defaults(text_of(env, GIVEN_DEFAULTS))
    missing = {
        name: value
        for name, value in {**defaults, **derived}.items()
        if origins.get(name.removeprefix("TSX_").lower(), "default") == "default"
    }
    entries = {name: name.removeprefix("TSX_").lower() for name in derived.keys() - env.keys()}
    sources = {name: f"entry '{entry}' of {GIVEN_DEFAULTS}" for name, entry in entries.items()}
    return load_settings({}, {**missing, **env}, file, warn, sources)[0]


def _given_defaults(text: str) -> dict[str, str]:
    parts = [part.partition("=") for part in text.split()]
    if not all(name and equals for name, equals, _ in parts):
        raise SettingError(
            f"{GIVEN_DEFAULTS} is '{text}'; it takes NAME=VALUE, with spaces between several"
        )
    return {f"TSX_{name.upper()}": value for name, _, value in parts}


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """The settings in a platform's variables, as tsx's settings."""

    variables: dict[
        str, str
    ]  # TSX_*: the platform's defaults, below what a user's variables and file set
    order: dict[str, Any]  # of each model's registration


def refuse_unknown(env: Mapping[str, str], prefix: str, known: Collection[str]) -> None:
    """Raise SettingError for a variable that begins with `prefix` and is not `known`."""
    for name in env:
        if name.startswith(prefix) and name not in known:
            raise SettingError(
                f"unknown variable '{name}'{suggestion(name, known) or '.'} There are"
                f" {', '.join(known)}"
            )


def text_of(env: Mapping[str, str], name: str) -> str:
    return env.get(name, "").strip()


def whole(env: Mapping[str, str], name: str) -> int | None:
    """None where it is not set."""
    text = text_of(env, name)
    if text and not text.isdecimal():
        raise SettingError(f"{name} is '{text}'; it takes a whole number")
    return int(text) if text else None


def number(env: Mapping[str, str], name: str, default: float) -> float:
    text = text_of(env, name)
    try:
        value = float(text or default)
    except ValueError:
        value = -1
    if not 0 <= value < 1e6:
        raise SettingError(f"{name} is '{text}'; it takes a number that is not negative")
    return value


def port_of(name: str, text: str) -> int:
    value = whole({name: text}, name) or 0
    if not 0 < value < 1 << 16:
        raise SettingError(f"{name} is '{text}', which is not a port")
    return value


def flag(env: Mapping[str, str], name: str) -> bool | None:
    """None where it is not set."""
    text = text_of(env, name).lower()
    if text and text not in ("true", "false"):
        raise SettingError(f"{name} is '{text}'; it takes true or false")
    return text == "true" if text else None


def one_of(env: Mapping[str, str], name: str, words: Sequence[str]) -> str:
    """In lower case, as `words` are; empty where it is not set."""
    text = text_of(env, name)
    if text and text.lower() not in words:
        raise SettingError(
            f"{name} is '{text}'{suggestion(text.lower(), words) or '.'} Use one of"
            f" {', '.join(words)}"
        )
    return text.lower()
