"""Hides the server's secrets, cloud credentials and clients' credentials from a model's code.

`pass_env` and `pass_headers`, for all models or in `[models.NAME]`, name what models do get.
Nothing in an archive can.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from multiprocessing import util
from subprocess import Popen
from typing import Any

from tsx_runtime.settings.schema import SECRETS, Settings

HEADERS = ("authorization", "proxy-authorization", "cookie")
# Other headers that identify a user. Every handler sees them.
USERS = (
    *("api-key", "x-api-key", "x-auth-token", "x-access-token", "x-amz-security-token"),
    *("x-goog-api-key", "x-forwarded-access-token", "x-forwarded-user", "x-forwarded-email"),
    *("x-auth-request-user", "x-remote-user"),
)
SERVERS = tuple(
    sorted(f"{prefix}{name.upper()}" for name in SECRETS for prefix in ("TSX_", "TS_"))
)  # by their whole names only
CREDENTIALS = (
    *(
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_SECURITY_TOKEN",
        "AWS_BEARER_TOKEN_*",
    ),
    *(
        "AWS_CONTAINER_CREDENTIALS_*",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN*",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
    ),
    *("AWS_SHARED_CREDENTIALS_FILE", "GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_AUTH_*"),
    *(
        "AZURE_CLIENT_SECRET",
        "AZURE_CLIENT_CERTIFICATE_*",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_STORAGE_KEY",
    ),
    *(
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_SAS_TOKEN",
        "IDENTITY_HEADER",
        "MSI_SECRET",
        "KUBECONFIG",
    ),
    *(
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HUGGINGFACE_TOKEN",
        "GITHUB_TOKEN",
        "GH_TOKEN",
        "OTEL_EXPORTER_OTLP*_HEADERS",
    ),
    # an application's own, such as DB_PASSWORD, was put there for the handler: `blacklist_env_vars`
    # hides it
)

DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE"
}  # of workers: threads that spin while they wait take cores from the others


def hidden_variables(settings: Settings, environ: Iterable[str]) -> list[str]:
    """Of the names in `environ` those that no worker, and no program of the server's, is started
    with.
    """
    hidden, blacklist = [], settings.blacklist_env_vars
    for name in environ:
        is_listed = blacklist is not None and re.fullmatch(blacklist, name) is not None
        if is_listed or (_is_secret(name) and not _is_passed(name, settings.pass_env)):
            hidden.append(name)
    return hidden


def passed_variables(settings: Settings, model: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Of the hidden ones those that `[models.NAME]` lets this model have all the same."""
    own = settings.models.get(model)
    if own is None or not own.pass_env:
        return {}
    blacklist = settings.blacklist_env_vars
    asked = [name for name in environ if _is_secret(name) and _is_passed(name, own.pass_env)]
    return {
        name: environ[name]
        for name in asked
        if blacklist is None or not re.fullmatch(blacklist, name)
    }


class HiddenHeaders:
    """The hidden headers of each model, in lower case."""

    def __init__(self, settings: Settings) -> None:
        self._usual = _less(frozenset(map(str.encode, HEADERS)), settings.pass_headers)
        self._own = {
            name: _less(self._usual, own.pass_headers)
            for name, own in settings.models.items()
            if own.pass_headers
        }
        hidden_by_all = self._usual.intersection(*self._own.values())
        self.seen_credentials = frozenset(map(str.encode, (*HEADERS, *USERS))) - hidden_by_all

    def of(self, model: str) -> frozenset[bytes]:
        return self._own.get(model, self._usual)


@contextmanager
def starting_without(hidden: Iterable[str], environ: Mapping[str, str]) -> Iterator[None]:
    """What multiprocessing starts within (the fork server, a spawned worker) never has these
    variables, in /proc/PID/environ either.

    It has no way of its own to choose an environment, and to change this process's for a moment
    would be seen by its other threads.
    """
    left_out = frozenset(hidden)

    def spawn(path: Any, args: Any, descriptors: Any) -> int:
        kept = DEFAULTS | {name: value for name, value in environ.items() if name not in left_out}
        process = Popen(
            args,
            executable=path,
            pass_fds=[int(each) for each in descriptors],
            env=kept,
            restore_signals=False,
        )
        process.returncode = 0  # multiprocessing waits for its end; `subprocess` must not
        return process.pid

    usual = util.spawnv_passfds
    util.spawnv_passfds = spawn  # type: ignore[assignment]  # typeshed has the kinds of its arguments, which are none of ours
    try:
        yield
    finally:
        util.spawnv_passfds = usual


def _is_secret(name: str) -> bool:
    return name in SERVERS or any(fnmatchcase(name, pattern) for pattern in CREDENTIALS)


def _is_passed(name: str, passed: Iterable[str]) -> bool:
    """The server's own secrets are in no pattern."""
    return any(
        name == pattern or (name not in SERVERS and fnmatchcase(name, pattern))
        for pattern in passed
    )


def _less(headers: frozenset[bytes], passed: Iterable[str]) -> frozenset[bytes]:
    return headers - {name.lower().encode() for name in passed}
