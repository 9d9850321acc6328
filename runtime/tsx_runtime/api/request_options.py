"""Options in a request's headers: priority, deadline, asynchronous response, idempotency key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tsx_runtime.api.headers import Pair
from tsx_runtime.errors import BadRequest

PRIORITY = b"x-tsx-priority"
TIMEOUT = b"x-tsx-timeout-ms"
MAX_PRIORITY = 100
MAX_TIMEOUT_MS = 86_400_000  # a day
PREFER = b"prefer"
IDEMPOTENCY_KEY = b"idempotency-key"
CALLBACK = b"x-tsx-callback-url"
JOB_SIZE = "max_job_size"  # the setting that limits bodies of stored requests
MAX_WAIT_S = 600  # longer waits are reduced to this


def priority_and_timeout(headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, int | None]:
    """Return the priority, and the timeout in milliseconds; header names are in lower case.

    The default priority is 0. Requests with a larger priority are served first.

    Raises:
        BadRequest: A value is invalid.
    """
    priority, timeout = 0, None
    for name, value in headers:
        if name == PRIORITY:
            priority = _whole_number(name, value, -MAX_PRIORITY, MAX_PRIORITY)
        elif name == TIMEOUT:
            timeout = _whole_number(name, value, 1, MAX_TIMEOUT_MS)
    return priority, timeout


def deadline(now: float, client_timeout: float, timeout_ms: int | None) -> float | None:
    """Return the earlier deadline of the model's timeout (seconds, 0: none) and the client's."""
    if timeout_ms is None:
        return now + client_timeout if client_timeout else None
    return now + (min(client_timeout, timeout_ms / 1000) if client_timeout else timeout_ms / 1000)


def _whole_number(name: bytes, value: bytes, minimum: int, maximum: int) -> int:
    try:
        number = int(value) if len(value) < 20 and b"_" not in value else None
    except ValueError:
        number = None
    if number is None or not minimum <= number <= maximum:
        text = value[:100].decode("latin-1")
        raise BadRequest(
            f"The header {name.decode()} is {text!r}: it must be a whole number from {minimum} to"
            f" {maximum}."
        )
    return number


class Preference(NamedTuple):
    """A client's preference for an asynchronous response after at most `wait` seconds."""

    wait: int = 0


def is_stored(headers: Iterable[Pair]) -> bool:
    """Tell whether the request may use the job store; header names are in lower case."""
    return any(
        name == IDEMPOTENCY_KEY or (name == PREFER and b"respond-async" in value.lower())
        for name, value in headers
    )


def parse_preference(headers: Iterable[Pair]) -> Preference | None:
    """Return the preference for an asynchronous response, or None.

    If a preference is repeated, the first one counts. An invalid wait counts as 0.
    """
    preferences: dict[str, str] = {}
    for name, value in headers:
        if name == PREFER:
            for preference in value.decode("latin-1").split(","):
                token, _, argument = preference.partition(";")[0].partition("=")
                preferences.setdefault(token.strip().lower(), argument.strip().strip('"'))
    if "respond-async" not in preferences:
        return None
    wait = preferences.get("wait", "")
    return Preference(min(int(wait[:9]), MAX_WAIT_S) if wait.isascii() and wait.isdigit() else 0)


def callback_of(headers: Iterable[Pair]) -> str:
    """Return the URL to which the response is sent, or an empty string."""
    return next(
        (value.decode("latin-1").strip() for name, value in headers if name == CALLBACK), ""
    )
