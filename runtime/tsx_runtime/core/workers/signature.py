"""The signature of a model: the types of its requests and responses, as its handler reports them.

A handler reports it as the dict `signature`, an attribute of its object. The dict `monitor_fields`
names the kinds of inputs for monitoring.
"""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from tsx_archiver.monitor.config import FieldKind, FieldPath

logger = logging.getLogger("tsx.registry")
InputKinds: TypeAlias = dict[FieldPath, FieldKind]
_MONITOR_FIELDS: TypeAdapter[InputKinds] = TypeAdapter(InputKinds)


class ModelSignature(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    input: dict[str, Any] = Field(description="JSON schema of a request's JSON body")
    output: dict[str, Any] = Field(
        default_factory=dict, description="JSON schema of a response, or of a part of a stream"
    )
    description: str = ""
    content_types: list[str] = Field(
        ["application/json"], description="the content types that a request may have"
    )
    output_type: str = Field("application/json", description="the content type of a response")
    streams: bool = Field(False, description="whether a response consists of server-sent events")
    example: Any = Field(None, description="an example of a request's JSON body")


def read_signature(facts: Any) -> ModelSignature | None:
    """Read the signature that a worker reports; one that is not valid is logged and ignored."""
    if facts is None:
        return None
    try:
        return ModelSignature.model_validate(facts)
    except ValidationError as error:
        logger.warning("the handler's signature is ignored: %s", error.errors(include_url=False)[0])
        return None


def read_monitor_fields(facts: Any) -> InputKinds:
    """Read the kinds of inputs that a worker reports; invalid ones are logged and ignored."""
    try:
        return _MONITOR_FIELDS.validate_python({} if facts is None else facts)
    except ValidationError as error:
        logger.warning(
            "the handler's monitor_fields are ignored: %s", error.errors(include_url=False)[0]
        )
        return {}
