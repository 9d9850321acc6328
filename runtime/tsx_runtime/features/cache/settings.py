"""The setting of a model for its reply cache."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BeforeValidator

from tsx_archiver.metadata.modelconfig import CacheConfig
from tsx_archiver.quantities import for_text
from tsx_runtime.settings.fields import FeatureModelSettings
from tsx_runtime.settings.model_limits import Accepts

Cache = Annotated[
    CacheConfig,
    BeforeValidator(for_text(json.loads)),
    Accepts('a table such as {size = "64MiB", ttl = "60s", key = ["x-user"]}; size = 0 for none'),
]


class CacheSettings(FeatureModelSettings):
    cache: Cache | None = None
    """how its answers are cached, in place of what its archive says; see caching.md"""
