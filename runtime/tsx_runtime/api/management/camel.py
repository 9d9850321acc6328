"""The base classes of the management API's schemas."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Camel(BaseModel):
    """A schema whose JSON has names in camelCase, as in Java."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, protected_namespaces=()
    )


class FeatureDescription(Camel):
    """The fields of a feature in the description of a version."""
