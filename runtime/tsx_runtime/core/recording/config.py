"""The settings of a recording: which share of a model's requests, for how long, how large."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

SMALLEST = 64 << 10  # bytes
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)")
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_TIMES = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _percent(value: Any) -> Any:
    return value.strip().removesuffix("%") if isinstance(value, str) else value


def _size(value: Any) -> Any:
    found = _NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    if isinstance(value, str) and (found is None or found[2].upper() not in _SIZES):
        raise ValueError("it takes a number of bytes, or a text such as 100MB or 2GB")
    return value if found is None else int(float(found[1]) * _SIZES[found[2].upper()])


def _seconds(value: Any) -> Any:
    found = _NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    if isinstance(value, str) and (found is None or found[2] not in _TIMES):
        raise ValueError("it takes a number of seconds, or a text such as 30m, 12h or 7d")
    return value if found is None else float(found[1]) * _TIMES[found[2]]


class RecordingConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[float, BeforeValidator(_percent)] = Field(100.0, gt=0, le=100, description="of the requests, in percent")
    max_size: Annotated[int, BeforeValidator(_size)] = Field(
        100_000_000, ge=SMALLEST, description="bytes of all files together, or a text such as 100MB; the oldest go first"
    )
    max_age: Annotated[float, BeforeValidator(_seconds)] = Field(
        86400.0, ge=1, le=3660 * 86400, description="seconds after which a request is removed, or a text such as 12h or 7d"
    )
    answers: bool = Field(False, description="keep the answers as well")
