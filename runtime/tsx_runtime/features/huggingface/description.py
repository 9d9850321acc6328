"""The added adapters in the description of a version."""

from __future__ import annotations

from pydantic import Field

from tsx_runtime.api.management.camel import FeatureDescription


class AdaptersDescription(FeatureDescription):
    added_adapters: dict[str, str] | None = Field(
        None, description="where its adapters come from, by name; only of those added while served"
    )
