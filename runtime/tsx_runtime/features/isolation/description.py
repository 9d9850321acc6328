"""The isolation in the description of a version."""

from __future__ import annotations

from pydantic import Field

from tsx_runtime.api.management.camel import FeatureDescription


class IsolationDescription(FeatureDescription):
    isolation: dict[str, str | int | float | bool] | None = Field(
        None,
        description="how its workers are isolated, and their limits; only if they are isolated",
    )
