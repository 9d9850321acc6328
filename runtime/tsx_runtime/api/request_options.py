"""The options in a request's headers: its priority and deadline, and whether it is stored."""

from __future__ import annotations

from collections.abc import Iterable

from tsx_runtime.api.headers import Pair
from tsx_runtime.errors import BadRequest

PRIORITY = b"x-tsx-priority"
TIMEOUT = b"x-tsx-timeout-ms"
MAX_PRIORITY = 100
MAX_TIMEOUT_MS = 86_400_000  # a day
PREFER = b"prefer"
IDEMPOTENCY_KEY = b"idempotency-key"


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


def is_stored(headers: Iterable[Pair]) -> bool:
    """Tell whether the headers ask to store the request; the fast lane does not take it then.

    Header names are in lower case.
    """
    return any(
        name == IDEMPOTENCY_KEY or (name == PREFER and b"respond-async" in value.lower())
        for name, value in headers
    )
