"""The translation of Lambda's and a function's variables to settings.

https://docs.aws.amazon.com/lambda/latest/dg/configuration-envvars.html describes Lambda's. A
`TSX_*` variable of the function, or a settings file in its image, overrides the defaults here. The
`TSX_LAMBDA_*` variables below are no settings of a server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tsx_runtime.errors import SettingError
from tsx_runtime.shared.suggestions import suggestion
from tsx_runtime.targets.image.environment import (
    EnvironmentSettings,
    read_choice,
    read_number,
    read_text,
)

PREFIX = "TSX_LAMBDA_"
RUNTIMES = ("awslambdaric", "tsx")
ANSWERS = ("buffered", "streamed")
VARIABLES = {  # Their values are read in `_read_options`.
    "TSX_LAMBDA_RUNTIME": "the client of Lambda's Runtime API: awslambdaric or tsx",
    "TSX_LAMBDA_ANSWERS": (
        "buffered, or streamed: HTTP answers go out part by part (tsx's own client alone can)"
    ),
    "TSX_LAMBDA_RESULTS": (
        "where the answers to SQS messages go: s3://BUCKET/PREFIX, the URL of a queue, or message"
    ),
    "TSX_LAMBDA_RESULTS_OWNER": "account that must own a bucket that answers go to; any if not set",
    "TSX_LAMBDA_BASE_PATH": (
        "prefix of the paths of requests, such as the mapping of a custom domain"
    ),
    "TSX_LAMBDA_INIT_WAIT": "seconds of Lambda's start-up phase in which the model is waited for",
}

TMP = "/tmp/tsx"  # the only writable directory
MAX_INVOCATION_S = 900
MAX_MANAGED_INVOCATION_S = 5400
MAX_PAYLOAD_BYTES = 6_291_556  # size of an invocation's input or output as JSON
QUEUE_SIZE = 10_000  # the most messages in one event of SQS
INIT_WAIT_S = 8.0  # Lambda stops a start-up phase after 10 s and starts it again.
# Variables of libraries that would write outside /tmp.
CACHE_VARIABLES = {
    "HOME": "/tmp",
    "XDG_CACHE_HOME": f"{TMP}/cache",
    "HF_HOME": f"{TMP}/huggingface",
    "TORCH_HOME": f"{TMP}/torch",
    "TORCHINDUCTOR_CACHE_DIR": f"{TMP}/inductor",
    "MPLCONFIGDIR": f"{TMP}/matplotlib",
    "NUMBA_CACHE_DIR": f"{TMP}/numba",
}


class FunctionSettings(NamedTuple):
    """The options of a function that are no settings of a server."""

    runtime: str = ""  # a name in RUNTIMES; empty lets the platform decide
    streams: bool = False
    results: str = ""
    results_owner: str = ""
    base_path: str = ""
    init_wait: float | None = INIT_WAIT_S  # None waits until the model is loaded or has failed
    concurrency: int = 1  # concurrent invocations of this environment

    @property
    def uses_own_client(self) -> bool:
        """Whether tsx's client of the Runtime API is needed, not AWS's."""
        return self.runtime == "tsx" or (
            not self.runtime and (self.concurrency > 1 or self.streams)
        )


@dataclass(frozen=True, kw_only=True)
class LambdaSettings(EnvironmentSettings):
    options: FunctionSettings


def read_environment(env: Mapping[str, str]) -> LambdaSettings:
    """Translate the variables.

    Raises:
        SettingError: A variable is unknown, or its value cannot be used.
    """
    options = _read_options(env)
    max_invocation = str(MAX_MANAGED_INVOCATION_S if options.concurrency > 1 else MAX_INVOCATION_S)
    defaults = {
        "TSX_ENABLE_GRPC": "false",
        "TSX_PASS_ENV": "*",  # The function's role is meant for the model's code.
        # There is no listener: requests come as events, with the host of their service.
        "TSX_ALLOWED_HOSTS": "*",
        "TSX_CACHE_DIR": f"{TMP}/models",
        "TSX_STATE_DIR": f"{TMP}/state",
        "TSX_MAX_REQUEST_SIZE": str(MAX_PAYLOAD_BYTES),
        # An answer that is too large for Lambda is refused later.
        "TSX_MAX_RESPONSE_SIZE": str(200 << 20),
        "TSX_DEFAULT_RESPONSE_TIMEOUT": max_invocation,
        "TSX_DEFAULT_STARTUP_TIMEOUT": max_invocation,
        "TSX_HEARTBEAT_TIMEOUT": "0",
    }
    order: dict[str, Any] = {"initial_workers": 1, "max_workers": 1, "job_queue_size": QUEUE_SIZE}
    if options.concurrency == 1:
        order["max_batch_delay"] = 0  # No other request can arrive while one waits.
    return LambdaSettings(variables=defaults, order=order, options=options)


def cache_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the cache variables that are not set, and HOME, whose directory is not writable."""
    return {
        name: path for name, path in CACHE_VARIABLES.items() if name == "HOME" or not env.get(name)
    }


def _read_options(env: Mapping[str, str]) -> FunctionSettings:
    for name in env:
        if name.startswith(PREFIX) and name not in VARIABLES:
            raise SettingError(
                f"{name} is not a setting{suggestion(name, VARIABLES) or '.'} There are"
                f" {', '.join(VARIABLES)}"
            )
    concurrency = read_number(env, "AWS_LAMBDA_MAX_CONCURRENCY", 1)
    options = FunctionSettings(
        runtime=read_choice(env, "TSX_LAMBDA_RUNTIME", RUNTIMES),
        streams=read_choice(env, "TSX_LAMBDA_ANSWERS", ANSWERS) == "streamed",
        results=_results(read_text(env, "TSX_LAMBDA_RESULTS")),
        results_owner=read_text(env, "TSX_LAMBDA_RESULTS_OWNER"),
        base_path=_base_path(read_text(env, "TSX_LAMBDA_BASE_PATH")),
        init_wait=_init_wait(env),
        concurrency=max(1, int(concurrency)),
    )
    if options.runtime == "awslambdaric" and options.streams:
        raise SettingError(
            "TSX_LAMBDA_ANSWERS is 'streamed', which awslambdaric cannot do. Remove"
            " TSX_LAMBDA_RUNTIME, or set it to tsx"
        )
    if options.runtime == "awslambdaric" and options.concurrency > 1:
        raise SettingError(
            f"TSX_LAMBDA_RUNTIME is 'awslambdaric', but this environment gets {options.concurrency}"
            " invocations at once, for which that would start as many processes with a model each."
            " Remove TSX_LAMBDA_RUNTIME, or set it to tsx"
        )
    return options


def _init_wait(env: Mapping[str, str]) -> float | None:
    """Return how long to wait for the model, or None for no limit.

    Only the start-up phase of an on-demand function is limited to 10 s. Elsewhere no request waits
    yet, and the environment should start ready.
    """
    if read_text(env, "TSX_LAMBDA_INIT_WAIT"):
        return read_number(env, "TSX_LAMBDA_INIT_WAIT", INIT_WAIT_S)
    return (
        INIT_WAIT_S
        if env.get("AWS_LAMBDA_INITIALIZATION_TYPE", "on-demand") == "on-demand"
        else None
    )


def _results(value: str) -> str:
    if value and value != "message" and not is_destination(value):
        raise SettingError(
            f"TSX_LAMBDA_RESULTS is '{value}'; it takes s3://BUCKET/PREFIX, the URL of an SQS"
            " queue, or 'message': each names its own"
        )
    return value


def is_destination(value: str) -> bool:
    """Tell whether answers can be sent to an address."""
    return (
        re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+(/.*)?|https?://[^/]+/[^/]+/[^/]+", value)
        is not None
    )


def _base_path(value: str) -> str:
    value = value.strip("/")
    return f"/{value}" if value else ""
