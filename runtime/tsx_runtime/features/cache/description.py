"""The reply cache in the description of a version."""

from __future__ import annotations

from pydantic import Field

from tsx_runtime.api.management.camel import Camel, FeatureDescription


class DescribedCache(Camel):
    entries: int
    size: int = Field(description="bytes of the entries")
    max_size: int
    hits: int = Field(description="requests that it answered, since the start")
    misses: int = Field(description="requests that it was asked for and could not answer")
    hit_ratio: float | None = Field(None, description="hits, as a share of both")


class CacheDescription(FeatureDescription):
    cache: DescribedCache | None = Field(None, description="only if the version has a reply cache")
