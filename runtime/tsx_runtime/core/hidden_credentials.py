"""Hides the server's secrets, cloud credentials and clients' credentials from a model's code.

The settings `pass_env` and `pass_headers` name exceptions, for all models or in `[models.NAME]`. An
archive cannot add exceptions.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from hashlib import blake2b
from multiprocessing import util
from subprocess import Popen
from typing import Any

from tsx_runtime.settings.schema import SECRETS, Settings
from tsx_runtime.wire import TENANT_HEADER

CREDENTIAL_HEADERS = ("authorization", "proxy-authorization", "cookie")
# Other headers that identify a user; every handler sees them.
USER_HEADERS = (
    *("api-key", "x-api-key", "x-auth-token", "x-access-token", "x-amz-security-token"),
    *("x-goog-api-key", "x-forwarded-access-token", "x-forwarded-user", "x-forwarded-email"),
    *("x-auth-request-user", "x-remote-user"),
)
_IDENTIFYING_HEADERS = frozenset(map(str.encode, (*CREDENTIAL_HEADERS, *USER_HEADERS)))
_TENANT_SECRET = secrets.token_bytes()
# Patterns in `pass_env` never match these names; they must be written in full.
SERVER_SECRETS = tuple(
    sorted(f"{prefix}{name.upper()}" for name in SECRETS for prefix in ("TSX_", "TS_"))
)
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
    # An application's own secrets, such as DB_PASSWORD, are meant for the handler.
    # `blacklist_env_vars` hides them.
)

# Threads that spin while they wait would take cores from the other workers.
WORKER_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}


def hidden_variables(settings: Settings, environ: Iterable[str]) -> list[str]:
    """Return the names in `environ` that workers and programs of the server never receive."""
    hidden, blacklist = [], settings.blacklist_env_vars
    for name in environ:
        is_listed = blacklist is not None and re.fullmatch(blacklist, name) is not None
        if is_listed or (_is_secret(name) and not _is_passed(name, settings.pass_env)):
            hidden.append(name)
    return hidden


def passed_variables(settings: Settings, model: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the hidden variables that `[models.NAME]` passes to this model."""
    model_settings = settings.models.get(model)
    if model_settings is None or not model_settings.pass_env:
        return {}
    blacklist = settings.blacklist_env_vars
    names = [
        name for name in environ if _is_secret(name) and _is_passed(name, model_settings.pass_env)
    ]
    return {
        name: environ[name]
        for name in names
        if blacklist is None or not re.fullmatch(blacklist, name)
    }


class HiddenHeaders:
    """The headers that are hidden from each model, in lower case."""

    def __init__(self, settings: Settings) -> None:
        self._default = _without_passed(
            frozenset(map(str.encode, CREDENTIAL_HEADERS)), settings.pass_headers
        )
        self._by_model = {
            name: _without_passed(self._default, model_settings.pass_headers)
            for name, model_settings in settings.models.items()
            if model_settings.pass_headers
        }
        hidden_by_all = self._default.intersection(*self._by_model.values())
        self.exposed_credential_headers = _IDENTIFYING_HEADERS - hidden_by_all

    def for_model(self, model: str) -> frozenset[bytes]:
        return self._by_model.get(model, self._default)

    def separate_tenants(self, model: str) -> None:
        """Let `shown_headers` add `TENANT_HEADER` to the headers that a model sees."""
        self._by_model[model] = self.for_model(model) | {TENANT_HEADER}


def tenant_header(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Return the header that is equal for requests with equal credentials, or with none.

    A request that was stored has the header already.
    """
    digest = blake2b(digest_size=16, key=_TENANT_SECRET)
    for name, value in sorted((name.lower(), value) for name, value in headers):
        if name == TENANT_HEADER:
            return name, value
        if name in _IDENTIFYING_HEADERS:
            digest.update(b"%b:%d:%b" % (name, len(value), value))
    return TENANT_HEADER, digest.hexdigest().encode()


@contextmanager
def hidden_from_children(hidden: Iterable[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Hide variables from the processes that multiprocessing starts, even in /proc/PID/environ.

    multiprocessing offers no parameter for the environment. If this process changed its own
    environment instead, its other threads would see the change.
    """
    hidden_names = frozenset(hidden)

    def spawn(path: Any, args: Any, descriptors: Any) -> int:
        variables = WORKER_DEFAULTS | {
            name: value for name, value in environ.items() if name not in hidden_names
        }
        process = Popen(
            args,
            executable=path,
            pass_fds=[int(descriptor) for descriptor in descriptors],
            env=variables,
            restore_signals=False,
        )
        process.returncode = 0  # multiprocessing waits for the process, so `Popen` must not.
        return process.pid

    original_spawn = util.spawnv_passfds
    util.spawnv_passfds = spawn  # type: ignore[assignment]  # The parameters have no types.
    try:
        yield
    finally:
        util.spawnv_passfds = original_spawn


def _is_secret(name: str) -> bool:
    return name in SERVER_SECRETS or any(fnmatchcase(name, pattern) for pattern in CREDENTIALS)


def _is_passed(name: str, passed: Iterable[str]) -> bool:
    """Tell whether a variable is passed; a pattern never passes the server's own secrets."""
    return any(
        name == pattern or (name not in SERVER_SECRETS and fnmatchcase(name, pattern))
        for pattern in passed
    )


def _without_passed(headers: frozenset[bytes], passed: Iterable[str]) -> frozenset[bytes]:
    return headers - {name.lower().encode() for name in passed}
