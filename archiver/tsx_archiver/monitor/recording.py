"""The configuration of a model's recording: `record` in model-config.yaml, and the API's body."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel

from tsx_archiver.quantities import for_text, parse_bytes, parse_percent, parse_seconds

MIN_TOTAL_BYTES = 64 << 10
MAX_ARCHIVE_BYTES = 1_000_000_000  # largest max_size that an archive may ask for


class RecordingConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[float, BeforeValidator(for_text(parse_percent))] = Field(
        100.0, gt=0, le=100, description="of the requests, in percent"
    )
    max_size: Annotated[int, BeforeValidator(for_text(parse_bytes))] = Field(
        100_000_000,
        ge=MIN_TOTAL_BYTES,
        description=(
            "maximum size of all files together: bytes, or a string such as 100MB; the oldest are"
            " removed first"
        ),
    )
    max_age: Annotated[float, BeforeValidator(for_text(parse_seconds))] = Field(
        86400.0,
        ge=1,
        le=3660 * 86400,
        description="age at which a request is removed: seconds, or a string such as 12h or 7d",
    )
    answers: bool = Field(False, description="record the answers as well")


class RecordingKeys(RecordingConfig):
    """The keys under `record` in model-config.yaml."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    @field_validator("max_size")
    @classmethod
    def _check_size(cls, size: int) -> int:
        if size > MAX_ARCHIVE_BYTES:
            raise ValueError(
                "it must be at most 1GB; only the server's own setting `record` may be larger"
            )
        return size
