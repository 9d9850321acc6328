"""The settings of a recording: share of the requests, maximum age, maximum size."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tsx_runtime.shared.quantities import parse_bytes, parse_percent, parse_seconds, where_text

SMALLEST = 64 << 10  # bytes


class RecordingConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[float, BeforeValidator(where_text(parse_percent))] = Field(
        100.0, gt=0, le=100, description="of the requests, in percent"
    )
    max_size: Annotated[int, BeforeValidator(where_text(parse_bytes))] = Field(
        100_000_000,
        ge=SMALLEST,
        description="maximum size of all files together: bytes, or a string such as 100MB; the oldest are removed first",
    )
    max_age: Annotated[float, BeforeValidator(where_text(parse_seconds))] = Field(
        86400.0, ge=1, le=3660 * 86400, description="age at which a request is removed: seconds, or a string such as 12h or 7d"
    )
    answers: bool = Field(False, description="record the answers as well")
