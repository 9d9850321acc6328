"""Translates the variables of Lambda and of a function into tsx's settings: pure functions of the
environment.

https://docs.aws.amazon.com/lambda/latest/dg/configuration-envvars.html has what Lambda sets. A
`TSX_*` variable of the function, or a settings file in its image, overrides the defaults here; the
`TSX_LAMBDA_*` variables are described below and are no settings of a server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tsx_runtime.errors import SettingError
from tsx_runtime.targets.image.environment import (
    EnvironmentSettings,
    number,
    one_of,
    refuse_unknown,
    text_of,
)

PREFIX = "TSX_LAMBDA_"
REMOVED = "TSX_LAMBDA_RUNTIME"  # chose AWS's client of the Runtime API
ANSWERS = ("buffered", "streamed")
NAMES = (
    # buffered, or streamed: HTTP answers go out part by part
    "TSX_LAMBDA_ANSWERS",
    # where the answers to SQS messages go: s3://BUCKET/PREFIX, the URL of a queue, or message
    "TSX_LAMBDA_RESULTS",
    # account that must own a bucket that answers go to; any if not set
    "TSX_LAMBDA_RESULTS_OWNER",
    # prefix of the paths of requests, such as the mapping of a custom domain
    "TSX_LAMBDA_BASE_PATH",
    # seconds of Lambda's start-up phase in which the model is waited for
    "TSX_LAMBDA_INIT_WAIT",
)

TMP = "/tmp/tsx"  # the only writable directory
LONGEST = 900  # seconds of an invocation
LONGEST_MANAGED = 5400
LARGEST = 6_291_556  # bytes of what an invocation takes and gives, as JSON
QUEUE = 10_000  # messages that one event of SQS may bring
INIT_WAIT = 8.0  # Lambda stops a start-up phase after 10 s and starts it again
HOMES = {  # of libraries that write outside /tmp
    "HOME": "/tmp",
    "XDG_CACHE_HOME": f"{TMP}/cache",
    "HF_HOME": f"{TMP}/huggingface",
    "TORCH_HOME": f"{TMP}/torch",
    "TORCHINDUCTOR_CACHE_DIR": f"{TMP}/inductor",
    "MPLCONFIGDIR": f"{TMP}/matplotlib",
    "NUMBA_CACHE_DIR": f"{TMP}/numba",
}


class FunctionSettings(NamedTuple):
    """The settings of the function that a server does not have."""

    streams: bool = False
    results: str = ""
    results_owner: str = ""
    base_path: str = ""
    init_wait: float | None = INIT_WAIT  # None: until the model is there, or has failed
    concurrency: int = 1  # invocations that this environment gets at once


@dataclass(frozen=True, kw_only=True)
class LambdaSettings(EnvironmentSettings):
    own: FunctionSettings


def read_environment(env: Mapping[str, str]) -> LambdaSettings:
    """Raises SettingError for an unknown variable or a value that cannot be used."""
    own = _own(env)
    longest = str(LONGEST_MANAGED if own.concurrency > 1 else LONGEST)
    defaults = {
        "TSX_ENABLE_GRPC": "false",
        "TSX_PASS_ENV": "*",  # the platform gives a function its role for the model's code
        # there is no listener: requests come as events, and carry their service's host
        "TSX_ALLOWED_HOSTS": "*",
        "TSX_CACHE_DIR": f"{TMP}/models",
        "TSX_STATE_DIR": f"{TMP}/state",
        "TSX_MAX_REQUEST_SIZE": str(LARGEST),
        "TSX_MAX_RESPONSE_SIZE": str(
            200 << 20
        ),  # an answer that is too large for Lambda is refused later
        "TSX_DEFAULT_RESPONSE_TIMEOUT": longest,
        "TSX_DEFAULT_STARTUP_TIMEOUT": longest,
        "TSX_HEARTBEAT_TIMEOUT": "0",  # a frozen thread sends no heartbeat
        "TSX_HEARTBEAT_INTERVAL": "3600",
    }
    order: dict[str, Any] = {"initial_workers": 1, "max_workers": 1, "job_queue_size": QUEUE}
    if own.concurrency == 1:
        order["max_batch_delay"] = 0  # no other request can arrive while one waits
    return LambdaSettings(variables=defaults, order=order, own=own)


def homes(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of the process for those that are not set; HOME always, since the image's own is
    not writable on Lambda.
    """
    return {name: place for name, place in HOMES.items() if name == "HOME" or not env.get(name)}


def _own(env: Mapping[str, str]) -> FunctionSettings:
    refuse_unknown(env, PREFIX, (*NAMES, REMOVED))
    return FunctionSettings(
        streams=one_of(env, "TSX_LAMBDA_ANSWERS", ANSWERS) == "streamed",
        results=_results(text_of(env, "TSX_LAMBDA_RESULTS")),
        results_owner=text_of(env, "TSX_LAMBDA_RESULTS_OWNER"),
        base_path=_base_path(text_of(env, "TSX_LAMBDA_BASE_PATH")),
        init_wait=_init_wait(env),
        concurrency=max(1, int(number(env, "AWS_LAMBDA_MAX_CONCURRENCY", 1))),
    )


def _init_wait(env: Mapping[str, str]) -> float | None:
    """Only an on-demand function has the limit of 10 s; elsewhere no request waits yet, and the
    environment should start ready.
    """
    if text_of(env, "TSX_LAMBDA_INIT_WAIT"):
        return number(env, "TSX_LAMBDA_INIT_WAIT", INIT_WAIT)
    return (
        INIT_WAIT if env.get("AWS_LAMBDA_INITIALIZATION_TYPE", "on-demand") == "on-demand" else None
    )


def _results(value: str) -> str:
    if value and value != "message" and not is_place(value):
        raise SettingError(
            f"TSX_LAMBDA_RESULTS is '{value}'; it takes s3://BUCKET/PREFIX, the URL of an SQS"
            " queue, or 'message': each names its own"
        )
    return value


def is_place(value: str) -> bool:
    """Whether answers can be sent there."""
    return (
        re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+(/.*)?|https?://[^/]+/[^/]+/[^/]+", value)
        is not None
    )


def _base_path(value: str) -> str:
    value = value.strip("/")
    return f"/{value}" if value else ""
