"""TorchServe's configuration: config.properties, TS_* variables that override it, and models."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from tsx_archiver.metadata.model_limits import SAVED
from tsx_archiver.metadata.slo import checked_target
from tsx_runtime.errors import SettingError
from tsx_runtime.settings.model_limits import with_limits
from tsx_runtime.settings.properties import parse_properties
from tsx_runtime.shared.suggestions import suggestion

ResultT = TypeVar("ResultT")

ENV_PREFIX = "TS_"
MODELS, SNAPSHOT = "models", "model_snapshot"
ENABLE_ENV, ENABLE_ENV_URLS, URLS = "enable_envvars_config", "use_env_allowed_urls", "allowed_urls"
# Keys that allow the environment to override others. Only the file can set them.
PERMISSION_KEYS = {ENABLE_ENV, ENABLE_ENV_URLS}
# A server without the feature must refuse this setting, because ignoring it would be unsafe.
PROTECTION = "isolation"

# Keys that TorchServe writes into its snapshots only as information.
_SNAPSHOT_NOTES = {"python", "tsConfigFile", "version"}

# Switches of features that are always on in tsx.
_ALWAYS_ON = {"ts_open_inference_protocol"}

# Keys for TorchServe's HTTP library, its logging, and the ports between its front end and workers.
JAVA_ONLY = {
    "async_logging",
    "debug",
    "initial_worker_port",
    "io_ratio",
    "model_server_home",
    "netty_client_threads",
    "number_of_netty_threads",
    "prefer_direct_buffer",
    "use_native_io",
    "vmargs",
}

# Keys that are accepted without effect, with the reason for the log.
_SEQUENCE_NAMES = [f"ts_header_key_sequence_{suffix}" for suffix in ("id", "start", "end")]
_CONNECTION_AGE_NAMES = [
    f"grpc_{role}_max_connection_age_{suffix}"
    for role in ("inference", "management")
    for suffix in ("ms", "grace_ms")
]
WITHOUT_EFFECT = dict.fromkeys(sorted(JAVA_ONLY), "only TorchServe's Java needs them") | {
    "cpp_log_config": "there is no C++ backend",
    "initial_distribution_port": "the processes of a model choose a free port themselves",
    **dict.fromkeys(
        ("ipex_enable", "ipex_gpu_enable"),
        "Intel has discontinued its extension, and torch contains its optimisations",
    ),
    "keystore_type": "tsx detects the type of a keystore from its first bytes",
    "plugins_path": "Java plugins cannot be loaded",
    **dict.fromkeys(_CONNECTION_AGE_NAMES, "connections have no maximum age"),
    **dict.fromkeys(
        _SEQUENCE_NAMES,
        "the headers of a sequence have the default names, ts_request_sequence_id, _start and _end",
    ),
}

_ADDRESSES = {f"{role}_address" for role in ("inference", "management", "metrics")}
KEYS = (
    WITHOUT_EFFECT.keys()
    | _SNAPSHOT_NOTES
    | PERMISSION_KEYS
    | _ADDRESSES
    | {
        f"grpc_{role}_{suffix}"
        for role in ("inference", "management")
        for suffix in ("address", "port")
    }
    | {
        MODELS,
        SNAPSHOT,
        URLS,
        "cpu_launcher_enable",
        "cpu_launcher_args",
        "keystore",
        "keystore_pass",
        "certificate_file",
        "private_key_file",
        "cors_allowed_origin",
        "cors_allowed_methods",
        "cors_allowed_headers",
        "disable_system_metrics",
        "system_metrics_cmd",
        "disable_token_authorization",
        "token_expiration_min",
        "enable_model_api",
        "metrics_config",
        "metrics_mode",
        "model_metrics_auto_detect",
        "metric_time_interval",
        "enable_metrics_api",
        "default_service_handler",
        "service_envelope",
        "install_py_dep_per_model",
        "blacklist_env_vars",
        "max_request_size",
        "max_response_size",
        "limit_max_image_pixels",
        "decode_input_request",
        "default_response_timeout",
        "default_startup_timeout",
        "unregister_model_timeout",
        "job_queue_size",
        "number_of_gpu",
        "enable_grpc_ssl",
        "model_store",
        "workflow_store",
        "load_models",
        "default_workers_per_model",
    }
    | _ALWAYS_ON
)

_ADDRESS_WITHOUT_PORT = re.compile(r"(http(s)?://(?:[^:/\[\]]+|\[[^\]]+\]))/?")
_VARIABLE = re.compile(r"\$\$([A-Za-z_][A-Za-z0-9_]*)\$\$")


class _CamelModel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")


@with_limits(SAVED)
class VersionSettings(_CamelModel):
    """The settings of one version in `models` or in a snapshot."""

    default_version: bool = False
    mar_name: str | None = None
    min_workers: int | None = Field(default=None, ge=0)
    max_workers: int | None = Field(default=None, ge=0)
    runtime_type: str | None = None
    # Only tsx has this setting. The settings that it replaces are written too, for TorchServe.
    slo: Annotated[str, AfterValidator(checked_target)] | None = None


Versions = dict[str, dict[str, VersionSettings]]  # keys: the model, then the version


class Snapshot(_CamelModel):
    """The models of a server. `created` is in milliseconds since the epoch."""

    name: str | None = None
    model_count: int | None = None
    created: int | None = None
    models: Versions = Field(default_factory=dict)


class PropertiesKey(NamedTuple):
    name: str
    text: str
    origin: str

    @property
    def is_true(self) -> bool:
        """The value as Java reads it: any text except "true" is false.

        Other texts occur: SageMaker's toolkit sometimes joins two lines.
        """
        return _is_true(self.text)


def read_torchserve_config(
    path: Path, env: Mapping[str, str], settings: Collection[str]
) -> tuple[list[PropertiesKey], list[str]]:
    """Read a config.properties.

    Args:
        path: The file.
        env: The environment.
        settings: The names of tsx's settings.

    Returns:
        The keys that the file or the environment sets, and notices for the user.

    Raises:
        SettingError: The file cannot be read, or names a variable that is not set.
    """
    return interpret(load_properties(path), env, settings, str(path))


def interpret(
    properties: Mapping[str, str], env: Mapping[str, str], settings: Collection[str], origin: str
) -> tuple[list[PropertiesKey], list[str]]:
    """Return the keys that have an effect, and notices for the user."""
    values = {
        name: PropertiesKey(name, _with_variables(name, text, env, origin), origin)
        for name, text in properties.items()
    }
    values |= {key.name: key for key in _from_variables(properties, env)}
    supported = {*settings, MODELS, SNAPSHOT}
    ineffective: dict[str, list[str]] = {}
    for name, reason in WITHOUT_EFFECT.items():
        if name in values:
            ineffective.setdefault(reason, []).append(name)
    notices = [
        f"{origin}: without effect here, since {reason}: {', '.join(names)}"
        for reason, names in ineffective.items()
    ]
    for name in values:
        if name not in KEYS | supported:
            if name == PROTECTION:
                raise SettingError(f"unknown setting '{name}' in {origin}")
            notices.append(
                f"{origin}: the key '{name}' is unknown, so it has no"
                f" effect{suggestion(name, sorted(KEYS | supported))}"
            )
    return [
        _with_port(key) for key in values.values() if key.name in supported and key.text.strip()
    ], notices


def load_properties(path: Path) -> dict[str, str]:
    """Return the keys and texts of a file.

    Raises:
        SettingError: The file cannot be read or is invalid.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingError(
            f"cannot read the configuration file '{path}': {error.strerror}"
        ) from error
    try:
        # Editors on Windows may begin a file with a byte order mark, which this codec drops.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")  # the encoding of Java's properties
    try:
        return parse_properties(text)
    except ValueError as error:
        raise SettingError(f"'{path}' is not a valid properties file: {error}") from error


def parse_versions(text: str, origin: str) -> tuple[Versions, list[str]]:
    """Parse the value of `models`: `{"name": {"version": {"batchSize": 4}}}`.

    Raises:
        SettingError: The value is invalid.
    """
    versions = _parse_json(TypeAdapter(Versions), text, MODELS, origin)
    return versions, _unknown_keys(json.loads(text), MODELS, origin)


def parse_snapshot(text: str, origin: str) -> tuple[Snapshot, list[str]]:
    """Parse the value of `model_snapshot`.

    Raises:
        SettingError: The value is invalid.
    """
    snapshot = _parse_json(TypeAdapter(Snapshot), text, SNAPSHOT, origin)
    return snapshot, _unknown_keys(json.loads(text).get("models", {}), f"{SNAPSHOT}.models", origin)


def _parse_json(kind: TypeAdapter[ResultT], text: str, name: str, origin: str) -> ResultT:
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        path = ".".join(map(str, (name, *first_error["loc"])))
        raise SettingError(
            f"{path} cannot be {str(first_error['input'])[:100]!r} (from {origin}):"
            f" {first_error['msg']}"
        ) from error


def _unknown_keys(models: Any, path: str, origin: str) -> list[str]:
    names = [to_camel(name) for name in VersionSettings.model_fields]
    return [
        f"{origin}: {path}.{model}.{version}.{name} has no effect here{suggestion(name, names)}"
        for model, versions in models.items()
        for version, values in versions.items()
        for name in values
        if name not in names
    ]


def _from_variables(
    properties: Mapping[str, str], env: Mapping[str, str]
) -> Iterator[PropertiesKey]:
    """Yield the TS_* variables, if the file allows them.

    `allowed_urls` needs the second permission, because it decides whose code may run.
    """
    if not _is_true(properties.get(ENABLE_ENV)):
        return
    excluded = (
        PERMISSION_KEYS if _is_true(properties.get(ENABLE_ENV_URLS)) else PERMISSION_KEYS | {URLS}
    )
    for name in sorted(KEYS - excluded):
        # Two keys begin with `ts_`; for these TorchServe does not add the prefix again.
        variable = name.upper() if name.startswith("ts_") else f"{ENV_PREFIX}{name.upper()}"
        if variable in env:
            yield PropertiesKey(name, env[variable], f"environment variable {variable}")


def _with_variables(name: str, text: str, env: Mapping[str, str], origin: str) -> str:
    """Replace each `$$NAME$$` by the environment variable NAME."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in env:
            raise SettingError(
                f"{name} in {origin} holds {match[0]}, but there is no environment variable"
                f" {match[1]}; set it"
            )
        return env[match[1]]

    return _VARIABLE.sub(value, text)


def _with_port(key: PropertiesKey) -> PropertiesKey:
    """Add the scheme's default port to an address without a port."""
    match = _ADDRESS_WITHOUT_PORT.fullmatch(key.text.strip()) if key.name in _ADDRESSES else None
    return key._replace(text=f"{match[1]}:{443 if match[2] else 80}") if match else key


def _is_true(text: str | None) -> bool:
    return text is not None and text.strip().lower() == "true"
