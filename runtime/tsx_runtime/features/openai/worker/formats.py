"""The formats of generated text that a request can ask for: OpenAI's, and those of vLLM."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import from_json

from tsx_runtime.features.generation.worker.interface import Grammar
from tsx_runtime.worker.codecs.bodies import BodyObject, JsonObject

SCHEMA_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class PlainFormat(BodyObject):
    """Any text, or a JSON object, for which clients of llama.cpp send a schema here."""

    type: Literal["text", "json_object"]
    definition: JsonObject = Field(default={"type": "object"}, alias="schema")


class SchemaFormat(BodyObject):
    """Text that follows a JSON schema, whether it is strict or not.

    `/v1/responses` uses this form. In chats, the schema is in a nested object.
    """

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=SCHEMA_NAME)]
    definition: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


TextFormat: TypeAlias = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


def _flatten_schema(format: Any) -> Any:
    if not isinstance(format, dict) or not isinstance(format.get("json_schema"), dict):
        return format
    return format["json_schema"] | {
        name: value for name, value in format.items() if name != "json_schema"
    }


ResponseFormat: TypeAlias = Annotated[TextFormat, BeforeValidator(_flatten_schema)]


class StructuredOutputs(BodyObject):
    """The grammar of a text, as vLLM's clients send it: one field, named after the grammar's kind.

    See https://docs.vllm.ai/en/latest/features/structured_outputs.html.
    """

    json_schema: (
        Annotated[
            JsonObject,
            BeforeValidator(lambda value: from_json(value) if isinstance(value, str) else value),
        ]
        | None
    ) = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    lark: str | None = Field(None, alias="grammar")

    @model_validator(mode="after")
    def _check_count(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("it must have one of json, json_object, regex, choice and grammar")
        return self

    def grammar(self) -> Grammar:
        ((kind, value),) = self.model_dump(exclude_unset=True).items()
        if kind == "json_object":
            kind, value = "json_schema", {"type": "object"}
        text = value if isinstance(value, str) else json.dumps(value)
        return Grammar(kind, text, "structured_outputs")  # type: ignore[arg-type]  # a kind's name
