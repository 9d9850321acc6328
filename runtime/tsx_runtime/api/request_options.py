"""What a request's headers ask for besides an answer: a priority, a deadline, and an answer that is
stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tsx_runtime.api.headers import Pair
from tsx_runtime.errors import BadRequest

PRIORITY = b"x-tsx-priority"
TIMEOUT = b"x-tsx-timeout-ms"
MOST_URGENT = 100
LONGEST = 86_400_000  # ms; a day
PREFER = b"prefer"
IDEMPOTENCY_KEY = b"idempotency-key"
CALLBACK = b"x-tsx-callback-url"
JOB_SIZE = "max_job_size"  # the setting that bounds their bodies
LONGEST_WAIT = 600  # seconds for which a request is held; what is longer counts as this


def priority_and_timeout(headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, int | None]:
    """Priority (0 where there is none; greater goes first) and milliseconds that the client will
    wait. Names are lower case.

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
        raise BadRequest(
            f"The header {name.decode()} is {shown!r}: it must be a whole number from {least} to"
            f" {most}."
        )
    return number


class Preference(NamedTuple):
    """A client that does not wait for the answer, or only so many seconds."""

    wait: int = 0


def is_stored(headers: Iterable[Pair]) -> bool:
    """Whether the request may be one that the store of jobs has to do with.

    Names are in lower case.
    """
    return any(
        name == IDEMPOTENCY_KEY or (name == PREFER and b"respond-async" in value.lower())
        for name, value in headers
    )


def parse_preference(headers: Iterable[Pair]) -> Preference | None:
    """None where the client waits for the answer.

    Of a preference that comes twice the first counts; one that cannot be read is none.
    """
    given: dict[str, str] = {}
    for name, value in headers:
        if name == PREFER:
            for each in value.decode("latin-1").split(","):
                token, _, argument = each.partition(";")[0].partition("=")
                given.setdefault(token.strip().lower(), argument.strip().strip('"'))
    if "respond-async" not in given:
        return None
    wait = given.get("wait", "")
    return Preference(min(int(wait[:9]), LONGEST_WAIT) if wait.isascii() and wait.isdigit() else 0)


def callback_of(headers: Iterable[Pair]) -> str:
    """The URL that the answer is to be sent to; empty where there is none."""
    return next(
        (value.decode("latin-1").strip() for name, value in headers if name == CALLBACK), ""
    )
