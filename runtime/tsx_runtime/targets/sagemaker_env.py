"""What SageMaker and its PyTorch toolkit say by environment variables, in tsx's own words: a pure function.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html and the toolkit's `SAGEMAKER_TS_*` and
`SAGEMAKER_MODEL_SERVER_*`, which its users have set in their models. A `TSX_*` variable goes before all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tsx_runtime.errors import SettingError
from tsx_runtime.nearest import suggestion

PORT = 8080
MANAGEMENT = "http://127.0.0.1:8081"  # nobody reaches it from outside
LARGEST = 1 << 30  # bytes of a body: what an asynchronous endpoint takes; the platform refuses earlier where it takes less
DRAIN = 25  # seconds; SIGKILL comes 30 s after SIGTERM
TIMEOUT = 60  # seconds that the toolkit gives a request
STARTUP = 600  # and the start of a model

ORDERS = {  # variable -> what of a registration it sets; the later of two goes before
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


class Said(NamedTuple):
    variables: dict[str, str]  # TSX_*, as defaults below those that are set
    order: dict[str, Any]  # of each model's registration
    notices: list[str]


def read_environment(env: Mapping[str, str]) -> Said:
    """Raises SettingError for a value that means nothing."""
    here = f"http://0.0.0.0:{_port(env)}"
    variables = {
        "TSX_INFERENCE_ADDRESS": here,
        "TSX_METRICS_ADDRESS": here,  # SageMaker reads /metrics where it sends requests
        "TSX_MANAGEMENT_ADDRESS": MANAGEMENT,
        "TSX_DISABLE_TOKEN_AUTHORIZATION": "true",  # only the platform reaches the container, and it sends no header of ours
        "TSX_ENABLE_GRPC": "false",
        "TSX_MAX_REQUEST_SIZE": str(LARGEST),
        "TSX_MAX_RESPONSE_SIZE": str(LARGEST),
        "TSX_DRAIN_TIMEOUT": str(DRAIN),
        "TSX_DEFAULT_RESPONSE_TIMEOUT": str(TIMEOUT),
        "TSX_DEFAULT_STARTUP_TIMEOUT": str(STARTUP),
    }
    order: dict[str, Any] = {}
    for name, key in ORDERS.items():
        if env.get(name, "").strip():
            order[key] = _whole(name, env[name])
    if "max_workers" in order:
        order.setdefault("initial_workers", min(1, order["max_workers"]))
        order["max_workers"] = max(order["max_workers"], order["initial_workers"])
    return Said(variables, order, _notices(env))


def _port(env: Mapping[str, str]) -> int:
    """In a pipeline, and beside other containers, the platform names the port, which has to lie in its range."""
    port = _whole("SAGEMAKER_BIND_TO_PORT", env["SAGEMAKER_BIND_TO_PORT"]) if env.get("SAGEMAKER_BIND_TO_PORT") else PORT
    if not 0 < port < 1 << 16:
        raise SettingError(f"SAGEMAKER_BIND_TO_PORT is {port}, which is no port")
    return port


def _whole(name: str, text: str) -> int:
    try:
        number = int(text.strip())
    except ValueError:
        number = -1
    if number < 0:
        raise SettingError(f"{name} is '{text}'; it takes a whole number")
    return number


def _notices(env: Mapping[str, str]) -> list[str]:
    told = []
    if env.get("SAGEMAKER_MODEL_SERVER_VMARGS"):
        told.append("SAGEMAKER_MODEL_SERVER_VMARGS is for a Java server and changes nothing here")
    known = [*ORDERS, *OTHERS]
    for name in sorted(env):
        if name.startswith(("SAGEMAKER_TS_", "SAGEMAKER_MODEL_SERVER_")) and name not in known:
            told.append(f"{name} changes nothing{suggestion(name, known)}")
    return told
