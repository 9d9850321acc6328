"""The priority and the deadline of a request: the headers `x-tsx-priority` and `x-tsx-timeout-ms`."""

from __future__ import annotations

from collections.abc import Iterable

from tsx_runtime.errors import BadRequest

PRIORITY = b"x-tsx-priority"
TIMEOUT = b"x-tsx-timeout-ms"
MOST_URGENT = 100
LONGEST = 86_400_000  # ms; a day


def priority_and_timeout(headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, int | None]:
    """Priority (0 where there is none; greater goes first) and milliseconds that the client will wait. Names are lower case.

    Raises BadRequest.
    """
    priority, timeout = 0, None
    for name, value in headers:
        if name == PRIORITY:
            priority = _whole(name, value, -MOST_URGENT, MOST_URGENT)
        elif name == TIMEOUT:
            timeout = _whole(name, value, 1, LONGEST)
    return priority, timeout


def deadline(now: float, client_timeout: float, timeout_ms: int | None) -> float | None:
    """The sooner of what the model gives (seconds; 0: any time) and what the client does."""
    if timeout_ms is None:
        return now + client_timeout if client_timeout else None
    return now + (min(client_timeout, timeout_ms / 1000) if client_timeout else timeout_ms / 1000)


def _whole(name: bytes, value: bytes, least: int, most: int) -> int:
    try:
        number = int(value) if len(value) < 20 and b"_" not in value else None
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        shown = value[:100].decode("latin-1")
        raise BadRequest(f"The header {name.decode()} is {shown!r}: it must be a whole number from {least} to {most}.")
    return number
