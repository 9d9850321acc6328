"""Which version answers a request: pure functions of the table and the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tsx_runtime.errors import ModelNotFound, ModelVersionNotFound

VersionT = TypeVar("VersionT")


def choose(name: str, versions: Mapping[str, VersionT] | None, default: str, wanted: str | None) -> VersionT:
    """The version that is asked for, or the default one. `versions` is None where no model has that name."""
    if versions is None:
        raise ModelNotFound(f"Model not found: {name}")
    version = versions.get(default if wanted is None else wanted)
    if version is None:
        raise ModelVersionNotFound(f"Model version: {wanted} does not exist for model: {name}")
    return version
