"""The headers of an asynchronous request: how long its client waits, and where the answer goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tsx_runtime.api.headers import Pair
from tsx_runtime.api.request_options import PREFER

CALLBACK = b"x-tsx-callback-url"
JOB_SIZE = "max_job_size"  # the setting that limits bodies of stored requests
MAX_WAIT_S = 600  # longer waits are reduced to this


class Preference(NamedTuple):
    """A client's preference for an asynchronous response after at most `wait` seconds."""

    wait: int = 0


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
