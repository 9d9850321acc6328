"""Where asynchronous answers are stored: the values of the setting `jobs_store`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from tsx_runtime.settings.model_limits import Accepts

OFF = "off"
SQLITE = "sqlite:///"
POSTGRES = ("postgresql://", "postgres://")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def _check(value: str) -> str:
    path = value.removeprefix(SQLITE)
    if (
        not path
        or "\0" in path
        or (
            _SCHEME.match(path)
            and len(path) > 1
            and path[1] != ":"
            and not path.startswith(POSTGRES)
        )
    ):
        raise ValueError("it names no store")
    return value


JobsStore = Annotated[
    str,
    AfterValidator(_check),
    Accepts("a file, sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE, or off"),
]
