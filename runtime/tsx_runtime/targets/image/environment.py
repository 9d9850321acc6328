"""The settings of a container, from its environment variables and its model directory.

    TSX_MODEL_DIR     directory of the model, by default /opt/ml/model; KServe uses /mnt/models
    TSX_MODEL_NAME    name of the model; it overrides the archive's name
    TSX_DEFAULTS      settings that `tsx deploy` has derived, as NAME=VALUE separated by spaces; the
                      user's variables and file override them

A directory that contains `model-store` has the layout of KServe's TorchServe runtime: the archives
are in `model-store`, and the settings in config/config.properties.
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

TARGET = "TSX_TARGET"  # the image sets it, and its entry point reads it
RUNTIME_API = "AWS_LAMBDA_RUNTIME_API"  # host and port; set only on Lambda
MODEL_DIR, MODEL_NAME = "TSX_MODEL_DIR", "TSX_MODEL_NAME"
DERIVED_DEFAULTS = "TSX_DEFAULTS"
DEFAULT_DIRECTORY = Path("/opt/ml/model")
# Defaults, which the user's settings override. A container listens on all addresses, because
# clients reach it by its own address.
DEFAULTS = {
    "inference_address": "http://0.0.0.0:8080",
    "management_address": "http://127.0.0.1:8081",  # other machines cannot reach it
    "metrics_address": "http://0.0.0.0:8082",
    # Behind a load balancer or an ingress, all clients have the same address.
    "max_connections_per_client": "0",
    "max_requests_per_client": "0",
}


class ModelLocation(NamedTuple):
    directory: Path
    name: str | None  # name of the model; None means the archive's name
    store: Path | None = None  # the model store of KServe's TorchServe layout
    config: Path | None = None  # the settings file in that layout


def locate_model(env: Mapping[str, str]) -> ModelLocation:
    directory = Path(env.get(MODEL_DIR) or DEFAULT_DIRECTORY)
    store = directory / "model-store"
    if not store.is_dir():
        return ModelLocation(directory, env.get(MODEL_NAME) or None)
    config = directory / "config" / "config.properties"
    return ModelLocation(directory, None, store, config if config.is_file() else None)


def read_settings(
    env: Mapping[str, str], location: ModelLocation, file: Path | None, notices: list[str]
) -> Settings:
    """Return the settings of a container.

    Raises:
        SettingError: A setting is unknown, or its value cannot be used.
    """
    user_env = dict(env)
    defaults = {f"TSX_{name.upper()}": value for name, value in DEFAULTS.items()}
    if location.store is not None:
        # This overrides the store in the settings file, which was written for another machine.
        user_env.setdefault("TSX_MODEL_STORE", str(location.store))
        defaults["TSX_LOAD_MODELS"] = "all"
    return read_settings_over(defaults, user_env, file or location.config, notices.append)


def read_settings_over(
    defaults: Mapping[str, str],
    env: Mapping[str, str],
    file: Path | None,
    warn: Callable[[str], None],
) -> Settings:
    """Return the settings; the user's variables and file override `defaults`.

    Raises:
        SettingError: A setting is unknown, or its value cannot be used.
    """
    _, origins = load_settings({}, env, file, lambda notice: None)
    derived_defaults = _parse_derived(read_text(env, DERIVED_DEFAULTS))
    unset_defaults = {
        name: value
        for name, value in {**defaults, **derived_defaults}.items()
        if origins.get(name.removeprefix("TSX_").lower(), "default") == "default"
    }
    entries = {
        name: name.removeprefix("TSX_").lower() for name in derived_defaults.keys() - env.keys()
    }
    sources = {name: f"entry '{entry}' of {DERIVED_DEFAULTS}" for name, entry in entries.items()}
    return load_settings({}, {**unset_defaults, **env}, file, warn, sources)[0]


def _parse_derived(text: str) -> dict[str, str]:
    parts = [part.partition("=") for part in text.split()]
    if not all(name and equals for name, equals, _ in parts):
        raise SettingError(
            f"{DERIVED_DEFAULTS} is '{text}'; it takes NAME=VALUE, with spaces between several"
        )
    return {f"TSX_{name.upper()}": value for name, _, value in parts}


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """The settings that result from a platform's variables."""

    # defaults as TSX_* variables; the user's variables and settings file override them
    variables: dict[str, str]
    order: dict[str, Any]  # options of each model's registration


def refuse_unknown(env: Mapping[str, str], prefix: str, known_names: Collection[str]) -> None:
    """Refuse variables that begin with `prefix` and are not in `known_names`.

    Raises:
        SettingError: A variable is unknown.
    """
    for name in env:
        if name.startswith(prefix) and name not in known_names:
            raise SettingError(
                f"unknown variable '{name}'{suggestion(name, known_names) or '.'} There are"
                f" {', '.join(known_names)}"
            )


def read_text(env: Mapping[str, str], name: str) -> str:
    return env.get(name, "").strip()


def read_integer(env: Mapping[str, str], name: str) -> int | None:
    """Return the whole number in a variable, or None if it is not set."""
    text = read_text(env, name)
    if text and not text.isdecimal():
        raise SettingError(f"{name} is '{text}'; it takes a whole number")
    return int(text) if text else None


def read_number(env: Mapping[str, str], name: str, default: float) -> float:
    text = read_text(env, name)
    try:
        value = float(text or default)
    except ValueError:
        value = -1
    if not 0 <= value < 1e6:
        raise SettingError(f"{name} is '{text}'; it takes a number that is not negative")
    return value


def parse_port(name: str, text: str) -> int:
    value = read_integer({name: text}, name) or 0
    if not 0 < value < 1 << 16:
        raise SettingError(f"{name} is '{text}', which is not a port")
    return value


def read_flag(env: Mapping[str, str], name: str) -> bool | None:
    """Return the boolean in a variable, or None if it is not set."""
    text = read_text(env, name).lower()
    if text and text not in ("true", "false"):
        raise SettingError(f"{name} is '{text}'; it takes true or false")
    return text == "true" if text else None


def read_choice(env: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Return a variable's value in lower case, like `choices`; empty if it is not set."""
    text = read_text(env, name)
    if text and text.lower() not in choices:
        raise SettingError(
            f"{name} is '{text}'{suggestion(text.lower(), choices) or '.'} Use one of"
            f" {', '.join(choices)}"
        )
    return text.lower()
