"""The latency target in the description of a version."""

from __future__ import annotations

from pydantic import Field

from tsx_runtime.api.management.camel import Camel, FeatureDescription


class DescribedSlo(Camel):
    """A latency target, and how well it is kept."""

    target: str
    batch_size: int = Field(
        description="size of the batches that requests are accepted for at present"
    )
    attained: int = Field(
        description="accepted requests that were answered within the target, since the start"
    )
    missed: int = Field(description="accepted requests that were not")
    refused: int = Field(description="requests refused on arrival")
    attainment: float | None = Field(
        None,
        description=(
            "share of the accepted requests of the last 5 minutes that were answered in time"
        ),
    )
    budget_left: float = Field(
        description=(
            "share of the allowed misses that is left in the last 60 minutes; below 0, there were"
            " more"
        )
    )


class SloDescription(FeatureDescription):
    slo: DescribedSlo | None = Field(None, description="only if the version has a latency target")
