"""Translates the variables of SageMaker and its PyTorch toolkit into tsx's settings: a pure
function.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html and the
toolkit's `SAGEMAKER_TS_*` and `SAGEMAKER_MODEL_SERVER_*`, which its users set in their models. A
`TSX_*` variable, or the settings file, overrides all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tsx_runtime.shared.suggestions import suggestion
from tsx_runtime.targets.image.environment import (
    EnvironmentSettings,
    flag,
    one_of,
    port_of,
    text_of,
    whole,
)

PORT = 8080
LARGEST = (
    1 << 30
    # bytes of a body: what an asynchronous endpoint takes; the platform refuses earlier where it
    # takes less
)
DRAIN = 25  # seconds; SIGKILL comes 30 s after SIGTERM
STARTUP = 600  # seconds that the toolkit gives the start of a model
STARTUP_SERVERLESS = 180  # and that SageMaker gives it where it begins on request
PAYLOAD = 6  # MB of one request of a batch transform

ORDERS = {  # variable -> the field of a registration that it sets; the later of two wins
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
OTHERS = (  # read elsewhere, or the platform's own
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
OWN = (MODE, LINES, MEMORY)  # tsx's, but no settings of a server elsewhere
# Mode -> seconds that a request may take.
TIMEOUTS = {"realtime": 60, "serverless": 60, "asynchronous": 3600, "transform": 600}
STRATEGIES = ("multi_record", "single_record")


class Transform(NamedTuple):
    """The parameters that a batch transform job sets itself; None where the container may
    choose.
    """

    concurrent: int | None = None
    strategy: str | None = None
    payload: int | None = None  # MB


@dataclass(frozen=True, kw_only=True)
class SageMakerSettings(EnvironmentSettings):
    notices: list[str]
    mode: str
    # Whether bodies of several lines are taken apart; None: where an archive is served.
    lines: bool | None
    multi_model: bool
    memory: int | None  # bytes that all models may take
    transform: Transform
    accept: str  # where a request does not say
    log_level: int | None


def read_environment(env: Mapping[str, str]) -> SageMakerSettings:
    """Raises SettingError for a value that means nothing."""
    port = port_of("SAGEMAKER_BIND_TO_PORT", env.get("SAGEMAKER_BIND_TO_PORT") or str(PORT))
    here = f"http://0.0.0.0:{port}"
    # The platform marks a batch transform job; the kind of an endpoint is known to its deployer
    # only.
    mode = one_of(env, MODE, [*TIMEOUTS]) or (
        "transform" if flag(env, "SAGEMAKER_BATCH") else "realtime"
    )
    variables = {
        "TSX_INFERENCE_ADDRESS": here,
        "TSX_METRICS_ADDRESS": here,  # SageMaker reads /metrics where it sends requests
        # not reachable from outside
        "TSX_MANAGEMENT_ADDRESS": f"http://127.0.0.1:{_management_port(env, port)}",
        # only the platform reaches the container, and it sends no header of ours
        "TSX_DISABLE_TOKEN_AUTHORIZATION": "true",
        "TSX_MAX_CONNECTIONS_PER_CLIENT": "0",  # the platform is the one client
        "TSX_MAX_REQUESTS_PER_CLIENT": "0",
        "TSX_MAX_FAILED_TOKENS": "0",
        # the platform gives a container its role, and its model's variables, for the model's code
        "TSX_PASS_ENV": "*",
        # clients of SageMaker choose by it how they read an answer
        "TSX_GUESS_CONTENT_TYPE": "true",
        "TSX_ENABLE_GRPC": "false",
        "TSX_MAX_REQUEST_SIZE": str(LARGEST),
        "TSX_MAX_RESPONSE_SIZE": str(LARGEST),
        "TSX_DRAIN_TIMEOUT": str(DRAIN),
        "TSX_DEFAULT_RESPONSE_TIMEOUT": str(TIMEOUTS[mode]),
        "TSX_DEFAULT_STARTUP_TIMEOUT": str(STARTUP_SERVERLESS if mode == "serverless" else STARTUP),
        "TSX_INSTALL_PY_DEP_PER_MODEL": "true",  # as the toolkit does
    }
    memory = whole(env, MEMORY)
    return SageMakerSettings(
        variables=variables,
        order=_order(env, mode),
        notices=_notices(env),
        mode=mode,
        lines=flag(env, LINES),
        multi_model=flag(env, "SAGEMAKER_MULTI_MODEL") or False,
        memory=memory << 20 if memory is not None else None,
        transform=_transform(env),
        accept=text_of(env, "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"),
        log_level=_level(env),
    )


def _order(env: Mapping[str, str], mode: str) -> dict[str, Any]:
    # Which has the memory and the processors for one.
    order: dict[str, Any] = {"initial_workers": 1} if mode == "serverless" else {}
    for name, key in ORDERS.items():
        if (value := whole(env, name)) is not None:
            order[key] = value
    if "max_workers" in order:
        order.setdefault("initial_workers", min(1, order["max_workers"]))
        order["max_workers"] = max(order["max_workers"], order["initial_workers"])
    return order


def _management_port(env: Mapping[str, str], port: int) -> int:
    """Beside other containers on one host, only the ports of the range may be used; without a range
    a free port is taken.
    """
    given = text_of(env, "SAGEMAKER_SAFE_PORT_RANGE")
    if not given:
        return PORT + 1 if port == PORT else 0
    first, _, last = given.partition("-")
    ports = range(
        port_of("SAGEMAKER_SAFE_PORT_RANGE", first),
        port_of("SAGEMAKER_SAFE_PORT_RANGE", last or first) + 1,
    )
    return next((each for each in reversed(ports) if each != port), 0)


def _transform(env: Mapping[str, str]) -> Transform:
    strategy = one_of(env, "SAGEMAKER_BATCH_STRATEGY", STRATEGIES).upper()
    concurrent, payload = (
        whole(env, "SAGEMAKER_MAX_CONCURRENT_TRANSFORMS"),
        whole(env, "SAGEMAKER_MAX_PAYLOAD_IN_MB"),
    )
    return Transform(concurrent, strategy or None, payload)


def _level(env: Mapping[str, str]) -> int | None:
    """Python's number of a level, as the toolkit has it, or its name."""
    text = text_of(env, "SAGEMAKER_CONTAINER_LOG_LEVEL").upper()
    level = logging.getLevelName(text) if text else None
    return (
        level
        if isinstance(level, int)
        else whole({"SAGEMAKER_CONTAINER_LOG_LEVEL": text}, "SAGEMAKER_CONTAINER_LOG_LEVEL")
    )


def _notices(env: Mapping[str, str]) -> list[str]:
    notices = []
    if env.get("SAGEMAKER_MODEL_SERVER_VMARGS"):
        notices.append("SAGEMAKER_MODEL_SERVER_VMARGS is for a Java server and has no effect here")
    known = [*ORDERS, *OTHERS]
    for name in sorted(env):
        if name.startswith(("SAGEMAKER_TS_", "SAGEMAKER_MODEL_SERVER_")) and name not in known:
            notices.append(f"{name} changes nothing{suggestion(name, known)}")
    return notices
