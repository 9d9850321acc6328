"""The translation of environment variables (Lambda's and the function's own) to settings.

Lambda's variables: https://docs.aws.amazon.com/lambda/latest/dg/configuration-envvars.html.
`TSX_*` variables of the function, or a settings file in its image, override the defaults here.
The `TSX_LAMBDA_*` variables below are options of functions only, not settings of a server.
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
ANSWER_MODES = ("buffered", "streamed")
VARIABLES = {  # `_read_options` reads their values.
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

TMP = "/tmp/tsx"  # only /tmp is writable on Lambda
MAX_INVOCATION_S = 900
MAX_MANAGED_INVOCATION_S = 5400
MAX_PAYLOAD_BYTES = 6_291_556  # limit for an invocation's input or output as JSON
QUEUE_SIZE = 10_000  # an SQS event has at most this many messages
INIT_WAIT_S = 8.0  # Lambda aborts and repeats a start-up phase that takes 10 s.
# variables for libraries that otherwise write outside of /tmp
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
    """The options that a function has in addition to the settings of a server."""

    runtime: str = ""  # an entry of RUNTIMES; if empty, the client is selected automatically
    streams: bool = False
    results: str = ""
    results_owner: str = ""
    base_path: str = ""
    init_wait: float | None = (
        INIT_WAIT_S  # seconds; None waits until the model is loaded or has failed
    )
    concurrency: int = 1  # most concurrent invocations of this environment

    @property
    def uses_own_client(self) -> bool:
        """Whether to use tsx's client of the Runtime API, because AWS's client is not enough."""
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
        "TSX_PASS_ENV": "*",  # The model's code may use the credentials of the function's role.
        # Requests come as events with an AWS host name. There is no listener to protect.
        "TSX_ALLOWED_HOSTS": "*",
        "TSX_CACHE_DIR": f"{TMP}/models",
        "TSX_STATE_DIR": f"{TMP}/state",
        "TSX_MAX_REQUEST_SIZE": str(MAX_PAYLOAD_BYTES),
        # Larger than Lambda's limit, because streams may be larger; `size_error` refuses others.
        "TSX_MAX_RESPONSE_SIZE": str(200 << 20),
        "TSX_DEFAULT_RESPONSE_TIMEOUT": max_invocation,
        "TSX_DEFAULT_STARTUP_TIMEOUT": max_invocation,
        "TSX_HEARTBEAT_TIMEOUT": "0",
    }
    order: dict[str, Any] = {"initial_workers": 1, "max_workers": 1, "job_queue_size": QUEUE_SIZE}
    if options.concurrency == 1:
        order["max_batch_delay"] = (
            0  # Waiting for a batch is useless, because there is one request at a time.
        )
    return LambdaSettings(variables=defaults, order=order, options=options)


def cache_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the cache variables that are not set, and always HOME, which is not writable."""
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
        streams=read_choice(env, "TSX_LAMBDA_ANSWERS", ANSWER_MODES) == "streamed",
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
    """Return the seconds to wait for the model at the start, or None for no limit.

    Only on-demand functions have a start-up phase of at most 10 s. Other environments start before
    they get requests, so they can wait until the model is loaded.
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
    """Tell whether a value is an address to which answers can be sent."""
    return (
        re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+(/.*)?|https?://[^/]+/[^/]+/[^/]+", value)
        is not None
    )


def _base_path(value: str) -> str:
    value = value.strip("/")
    return f"/{value}" if value else ""
