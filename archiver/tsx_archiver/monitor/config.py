"""The configuration of a model's monitoring: `monitor` in model-config.yaml, and the API's body."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from tsx_archiver.quantities import for_text, parse_percent, parse_seconds

HEADER_PREFIX = "header:"  # In a path, the name of a request header follows it.

FieldKind = Literal["number", "category", "text", "image", "embedding", "ignore"]
FieldPath = Annotated[str, StringConstraints(min_length=1, max_length=200)]
"""The path of a value: `age`, `customer.age`, `0`, or `header:x-country`."""
text_or_list = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)


class MonitorConfig(BaseModel):
    """The configuration of a model's monitoring."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True
    )

    share: Annotated[float, BeforeValidator(for_text(parse_percent))] = Field(
        5.0, gt=0, le=100, description="of the requests, in percent"
    )
    fields: dict[FieldPath, FieldKind] | None = Field(
        None,
        max_length=200,
        description=(
            "kinds of the inputs by their paths, instead of those that the handler or the baseline"
            " names"
        ),
    )
    prediction: FieldPath | None = Field(
        None, description="path of the value in the answer that feedback is compared with"
    )
    key: FieldPath | None = Field(
        None,
        description=(
            "path of a value in the request, or header:NAME, by which feedback can name the request"
        ),
    )
    groups: Annotated[tuple[FieldPath, ...], text_or_list] = Field(
        (),
        max_length=20,
        description=(
            "attributes whose groups are compared: paths in the request, header:NAME, or names that"
            " feedback uses"
        ),
    )
    positive: str | None = Field(
        None,
        description="the favourable class, for the selection rate; without it, each class is shown",
    )
    min_group: int = Field(
        20, ge=1, le=1_000_000, description="smallest number of requests of a group that is shown"
    )
    window_samples: int = Field(
        1000, ge=50, le=100_000, description="samples after which a window ends"
    )
    window: Annotated[float, BeforeValidator(for_text(parse_seconds))] = Field(
        3600.0,
        ge=1,
        le=30 * 86400,
        description=(
            "time after which a window with at least 50 samples ends: seconds, or a string such as"
            " 1h"
        ),
    )
    min_drift: float = Field(
        0.1,
        gt=0,
        le=10,
        description="smallest population stability index of a field that raises an alarm",
    )
    alarm_rate: float = Field(
        0.05, gt=0, lt=1, description="probability of a false alarm of a version in 30 days"
    )
