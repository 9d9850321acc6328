"""The headers of requests whose answers are stored: `Prefer: respond-async` (RFC 7240), `Idempotency-Key`, `x-tsx-callback-url`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tsx_runtime.api.headers import Pair

PREFER = b"prefer"
IDEMPOTENCY_KEY = b"idempotency-key"
CALLBACK = b"x-tsx-callback-url"
JOB_SIZE = "max_job_size"  # the setting that bounds their bodies
LONGEST_WAIT = 600  # seconds for which a request is held; what is longer counts as this


class Preference(NamedTuple):
    """A client that does not wait for the answer, or only so many seconds."""

    wait: int = 0


def is_stored(headers: Iterable[Pair]) -> bool:
    """Whether the request may be one that the store of jobs has to do with. Names are in lower case."""
    return any(name == IDEMPOTENCY_KEY or (name == PREFER and b"respond-async" in value.lower()) for name, value in headers)


def parse_preference(headers: Iterable[Pair]) -> Preference | None:
    """None where the client waits for the answer. Of a preference that comes twice the first counts; one that cannot be read is none."""
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
    return next((value.decode("latin-1").strip() for name, value in headers if name == CALLBACK), "")
