"""The settings of a container, from its environment variables and the layout of its model directory.

    TSX_MODEL_DIR     where the model lies, /opt/ml/model if not set; KServe puts it into /mnt/models
    TSX_MODEL_NAME    what the one model is called, in place of its archive's own name

A directory that holds `model-store` is laid out as KServe's TorchServe runtime has it: archives there, and config/config.properties.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.sources import load_settings

TARGET = "TSX_TARGET"  # set by the image, read by its entry point
RUNTIME_API = "AWS_LAMBDA_RUNTIME_API"  # host and port; set on Lambda only
MODEL_DIR, MODEL_NAME = "TSX_MODEL_DIR", "TSX_MODEL_NAME"
OWN = (MODEL_DIR, MODEL_NAME)  # no settings of a server
USUAL = Path("/opt/ml/model")
DEFAULTS = {  # overridden by any setting of the user: clients reach a container by its own address only
    "inference_address": "http://0.0.0.0:8080",
    "management_address": "http://127.0.0.1:8081",  # not reachable from outside
    "metrics_address": "http://0.0.0.0:8082",
    "max_connections_per_client": "0",  # a load balancer or an ingress in front has one address for all clients
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


def settings_of(env: Mapping[str, str], place: ModelLocation, file: Path | None, notices: list[str]) -> Settings:
    """Raises SettingError."""
    given = {name: value for name, value in env.items() if name not in OWN}
    defaults = dict(DEFAULTS)
    if place.store is not None:
        given.setdefault("TSX_MODEL_STORE", str(place.store))  # overrides that of the file, which was written on another machine
        defaults["load_models"] = "all"
    file = file or place.config
    _, origins = load_settings({}, given, file, lambda notice: None)
    missing = {f"TSX_{name.upper()}": value for name, value in defaults.items() if origins[name] == "default"}
    return load_settings({}, {**missing, **given}, file, notices.append)[0]
