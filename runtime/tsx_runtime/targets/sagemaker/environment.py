"""The translation of variables of SageMaker, and of its PyTorch toolkit, to settings.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html describes
SageMaker's variables. The toolkit has `SAGEMAKER_TS_*` and `SAGEMAKER_MODEL_SERVER_*`. `TSX_*`
variables and the settings file override all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tsx_runtime.shared.suggestions import suggestion
from tsx_runtime.targets.image.environment import (
    EnvironmentSettings,
    parse_port,
    read_choice,
    read_flag,
    read_integer,
    read_text,
)

PORT = 8080
# The limit of asynchronous endpoints. SageMaker itself enforces smaller limits for other endpoints.
MAX_BODY_BYTES = 1 << 30
DRAIN_S = 25  # shorter than the 30 s from SIGTERM to SIGKILL
STARTUP_S = 600  # the toolkit's timeout for loading a model
SERVERLESS_STARTUP_S = 180  # SageMaker's timeout for loading a model on a request
PAYLOAD_MB = 6  # default size of a batch transform job's request

# Fields of a registration by variable. If two variables set the same field, the later one counts.
ORDER_FIELDS = {
    "SAGEMAKER_MODEL_SERVER_WORKERS": "initial_workers",
    "SAGEMAKER_TS_MIN_WORKERS": "initial_workers",
    "SAGEMAKER_TS_MAX_WORKERS": "max_workers",
    "SAGEMAKER_TS_BATCH_SIZE": "batch_size",
    "SAGEMAKER_TS_MAX_BATCH_DELAY": "max_batch_delay",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT": "response_timeout",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "response_timeout",
    "SAGEMAKER_TS_RESPONSE_TIMEOUT": "response_timeout",
    "SAGEMAKER_STARTUP_TIMEOUT": "startup_timeout",
}
# variables that are read elsewhere, or that only SageMaker uses
OTHER_VARIABLES = (
    "SAGEMAKER_BIND_TO_PORT",
    "SAGEMAKER_SAFE_PORT_RANGE",
    "SAGEMAKER_MULTI_MODEL",
    "SAGEMAKER_BATCH",
    "SAGEMAKER_BATCH_STRATEGY",
    "SAGEMAKER_MAX_PAYLOAD_IN_MB",
    "SAGEMAKER_MAX_CONCURRENT_TRANSFORMS",
    "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT",
    "SAGEMAKER_CONTAINER_LOG_LEVEL",
    "SAGEMAKER_PROGRAM",
    "SAGEMAKER_SUBMIT_DIRECTORY",
    "SAGEMAKER_BASE_DIR",
    "SAGEMAKER_HANDLER",
    "SAGEMAKER_REGION",
    "SAGEMAKER_MODEL_SERVER_VMARGS",
)
MODE, LINES, MEMORY = "TSX_SAGEMAKER_MODE", "TSX_SAGEMAKER_LINES", "TSX_SAGEMAKER_MODELS_MEMORY"
TSX_VARIABLES = (MODE, LINES, MEMORY)  # variables of tsx that exist only on SageMaker
# SageMaker's timeout for a request, by mode
TIMEOUTS_S = {"realtime": 60, "serverless": 60, "asynchronous": 3600, "transform": 600}
STRATEGIES = ("multi_record", "single_record")


class Transform(NamedTuple):
    """The parameters of a batch transform job; the container chooses those that are None."""

    concurrent: int | None = None
    strategy: str | None = None
    payload: int | None = None  # megabytes


@dataclass(frozen=True, kw_only=True)
class SageMakerSettings(EnvironmentSettings):
    notices: list[str]
    mode: str
    # Whether bodies are split into lines; None splits them if the model is an archive.
    lines: bool | None
    multi_model: bool
    memory: int | None  # limit for the memory of all models, in bytes
    transform: Transform
    accept: str  # used for requests without an Accept header
    log_level: int | None


def read_environment(env: Mapping[str, str]) -> SageMakerSettings:
    """Translate the variables.

    Raises:
        SettingError: A value is invalid.
    """
    port = parse_port("SAGEMAKER_BIND_TO_PORT", env.get("SAGEMAKER_BIND_TO_PORT") or str(PORT))
    address = f"http://0.0.0.0:{port}"
    # SageMaker tells if this is a batch transform job. `tsx deploy` sets the mode of endpoints.
    mode = read_choice(env, MODE, [*TIMEOUTS_S]) or (
        "transform" if read_flag(env, "SAGEMAKER_BATCH") else "realtime"
    )
    variables = {
        "TSX_INFERENCE_ADDRESS": address,
        "TSX_METRICS_ADDRESS": address,  # Metrics are served at the only port that SageMaker uses.
        # Other machines cannot reach this address.
        "TSX_MANAGEMENT_ADDRESS": f"http://127.0.0.1:{_management_port(env, port)}",
        # Only SageMaker can reach the container, and it sends no token.
        "TSX_DISABLE_TOKEN_AUTHORIZATION": "true",
        "TSX_MAX_CONNECTIONS_PER_CLIENT": "0",  # SageMaker is the only client.
        "TSX_MAX_REQUESTS_PER_CLIENT": "0",
        "TSX_MAX_FAILED_TOKENS": "0",
        # The model's code may use the container's role and all variables of the model.
        "TSX_PASS_ENV": "*",
        # SageMaker's clients parse an answer by its content type, so one is needed.
        "TSX_GUESS_CONTENT_TYPE": "true",
        "TSX_ENABLE_GRPC": "false",
        "TSX_MAX_REQUEST_SIZE": str(MAX_BODY_BYTES),
        "TSX_MAX_RESPONSE_SIZE": str(MAX_BODY_BYTES),
        "TSX_DRAIN_TIMEOUT": str(DRAIN_S),
        "TSX_DEFAULT_RESPONSE_TIMEOUT": str(TIMEOUTS_S[mode]),
        "TSX_DEFAULT_STARTUP_TIMEOUT": str(
            SERVERLESS_STARTUP_S if mode == "serverless" else STARTUP_S
        ),
        "TSX_INSTALL_PY_DEP_PER_MODEL": "true",  # the toolkit's default
    }
    memory = read_integer(env, MEMORY)
    return SageMakerSettings(
        variables=variables,
        order=_order(env, mode),
        notices=_notices(env),
        mode=mode,
        lines=read_flag(env, LINES),
        multi_model=read_flag(env, "SAGEMAKER_MULTI_MODEL") or False,
        memory=memory << 20 if memory is not None else None,
        transform=_transform(env),
        accept=read_text(env, "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"),
        log_level=_log_level(env),
    )


def _order(env: Mapping[str, str], mode: str) -> dict[str, Any]:
    # A serverless endpoint has only enough memory and processors for one worker.
    order: dict[str, Any] = {"initial_workers": 1} if mode == "serverless" else {}
    for name, key in ORDER_FIELDS.items():
        if (value := read_integer(env, name)) is not None:
            order[key] = value
    if "max_workers" in order:
        order.setdefault("initial_workers", min(1, order["max_workers"]))
        order["max_workers"] = max(order["max_workers"], order["initial_workers"])
    return order


def _management_port(env: Mapping[str, str], port: int) -> int:
    """Choose the port of the management API.

    If SageMaker gives a range of ports, only these are not used by other containers on the host.
    """
    port_range = read_text(env, "SAGEMAKER_SAFE_PORT_RANGE")
    if not port_range:
        return PORT + 1 if port == PORT else 0
    first, _, last = port_range.partition("-")
    ports = range(
        parse_port("SAGEMAKER_SAFE_PORT_RANGE", first),
        parse_port("SAGEMAKER_SAFE_PORT_RANGE", last or first) + 1,
    )
    return next((candidate for candidate in reversed(ports) if candidate != port), 0)


def _transform(env: Mapping[str, str]) -> Transform:
    strategy = read_choice(env, "SAGEMAKER_BATCH_STRATEGY", STRATEGIES).upper()
    concurrent = read_integer(env, "SAGEMAKER_MAX_CONCURRENT_TRANSFORMS")
    payload = read_integer(env, "SAGEMAKER_MAX_PAYLOAD_IN_MB")
    return Transform(concurrent, strategy or None, payload)


def _log_level(env: Mapping[str, str]) -> int | None:
    """Return the log level; the variable has its number, as in the toolkit, or its name."""
    text = read_text(env, "SAGEMAKER_CONTAINER_LOG_LEVEL").upper()
    level = logging.getLevelName(text) if text else None
    return (
        level
        if isinstance(level, int)
        else read_integer({"SAGEMAKER_CONTAINER_LOG_LEVEL": text}, "SAGEMAKER_CONTAINER_LOG_LEVEL")
    )


def _notices(env: Mapping[str, str]) -> list[str]:
    notices = []
    if env.get("SAGEMAKER_MODEL_SERVER_VMARGS"):
        notices.append("SAGEMAKER_MODEL_SERVER_VMARGS is for a Java server and has no effect here")
    known_names = [*ORDER_FIELDS, *OTHER_VARIABLES]
    for name in sorted(env):
        if (
            name.startswith(("SAGEMAKER_TS_", "SAGEMAKER_MODEL_SERVER_"))
            and name not in known_names
        ):
            notices.append(f"{name} changes nothing{suggestion(name, known_names)}")
    return notices
