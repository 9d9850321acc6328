"""The messages and tools of a chat, and their conversion for chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, field_validator, model_validator
from pydantic_core import from_json

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import Grammar, Prompt
from tsx_runtime.features.generation.worker.media import Kind, MediaFile, no_media_error
from tsx_runtime.worker.codecs.bodies import BodyObject, JsonObject, RefusedField, quote_value

MAX_FILES = 16  # images and sounds in a chat
FILE_KINDS: Mapping[str, Kind] = {"image_url": "image", "input_audio": "audio"}


class ContentPart(BodyObject, extra="ignore"):
    """A text, an image or a sound in a message; images are URLs, and sounds are base64."""

    type: Literal[
        "text", "input_text", "output_text", "refusal", "image_url", "input_image", "input_audio"
    ]
    text: str | None = Field(None, validation_alias=AliasChoices("text", "refusal"))
    image_url: Annotated[str | None, BeforeValidator(lambda value: _value_of(value, "url"))] = None
    input_audio: Annotated[str | None, BeforeValidator(lambda value: _value_of(value, "data"))] = (
        None
    )

    @property
    def field(self) -> str:
        """The name of the field that has the content."""
        name = "image_url" if self.type == "input_image" else self.type
        return name if name in FILE_KINDS else "text"

    @property
    def value(self) -> str | None:
        content: str | None = getattr(self, self.field)
        return content

    @model_validator(mode="after")
    def _check_field(self) -> ContentPart:
        if self.value is None:
            raise ValueError(f"it has no '{self.field}'")
        return self


def _value_of(field: Any, name: str) -> Any:
    """Return the content of a field, which is an object in chats and a text in responses."""
    return field.get(name) if isinstance(field, dict) else field


class CalledFunction(BodyObject, extra="ignore"):
    """A function call in an earlier response.

    The arguments are parsed, since templates encode them as JSON themselves. Arguments that are not
    JSON remain a text, as the model wrote them.
    """

    name: str
    arguments: Any = {}

    @field_validator("arguments")
    @classmethod
    def _parse_arguments(cls, value: Any) -> Any:
        try:
            return from_json(value or "{}") if isinstance(value, str) else value
        except ValueError:
            return value


class ToolCall(BodyObject, extra="ignore"):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BodyObject, extra="ignore"):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            list[ContentPart],
            BeforeValidator(
                lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value
            ),
        ]
        | None
    ) = None
    reasoning_content: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("it has no 'content'")
        return self

    def for_template(self) -> JsonObject:
        """Convert the message for a chat template."""
        optional = self.model_dump(
            include={"reasoning_content", "name", "tool_call_id", "tool_calls"},
            exclude_none=True,
        )
        content: list[JsonObject] = []
        for part in self.content or ():
            if (kind := FILE_KINDS.get(part.field)) is not None:
                content.append({"type": kind, kind: ""})
            else:
                content.append({"type": "text", "text": part.value})
        is_text = all(part["type"] == "text" for part in content)
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": "".join(part["text"] for part in content) if is_text else content,
        } | optional


class ToolFunction(BodyObject, extra="ignore"):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None


class Tool(BodyObject, extra="ignore"):
    type: Literal["function"]
    function: ToolFunction


def choose_tools(
    tools: Sequence[Tool], choice: Any, is_parallel: bool = True, grammar: Grammar | None = None
) -> tuple[list[JsonObject], Grammar | None]:
    """Return the tools for the prompt, and the grammar of the response.

    A call is a JSON object with `name` and `arguments`. A response that must be a call is one
    object if the function is named or calls are not parallel, and otherwise a list of objects.

    Args:
        tools: The tools of the request.
        choice: The field `tool_choice`.
        is_parallel: Whether the response may have several calls.
        grammar: The grammar of a response that is not a call.

    Raises:
        RefusedField: `choice` is unknown, or names a function that is not in `tools`; or the
            grammar leaves no place for a call.
    """
    if choice == "none" or (not tools and choice in (None, "auto")):
        return [], grammar
    template_tools = [tool.model_dump(exclude_none=True) for tool in tools]
    is_free = choice in (None, "auto")
    if is_free and grammar is None:
        return template_tools, None
    if grammar is not None and grammar.kind != "json_schema":
        raise RefusedField(
            "With 'tools', the field 'structured_outputs' can only have a JSON schema. Send one, or no"
            " tools.",
            "structured_outputs",
            code="invalid_value",
        )
    names = [tool.function.name for tool in tools]
    try:
        chosen_names = names if is_free or choice == "required" else [choice["function"]["name"]]
    except (TypeError, KeyError):
        chosen_names = []
    if not chosen_names or not all(name in names for name in chosen_names):
        raise RefusedField(
            f"The field 'tool_choice' is {quote_value(choice)}; it must be auto, none, required or"
            f" one of the functions in 'tools' ({', '.join(names) or 'there are none'}).",
            "tool_choice",
            code="invalid_value",
        )
    call_schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                # References within the parameters begin at their own identifier.
                "arguments": {"$id": f"urn:tool:{index}", "type": "object"}
                | (tool.function.parameters or {}),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
        if tool.function.name in chosen_names
    ]
    schema: JsonObject = call_schemas[0] if len(call_schemas) == 1 else {"anyOf": call_schemas}
    if is_free and grammar is not None:
        schema = {"anyOf": [schema, {"$id": "urn:response"} | json.loads(grammar.text)]}
    elif is_parallel and choice == "required":
        schema = {"type": "array", "items": schema, "minItems": 1}
    return template_tools, Grammar("json_schema", json.dumps(schema))


def encode_messages(
    generator: TextGenerator,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> Prompt:
    """Encode a chat by the model's chat template.

    Raises:
        RefusedField: The template ignores the tools, or an image or sound cannot be used.
        InvalidInput: The template refuses the messages.
    """
    chat, files = (
        [message.for_template() for message in messages],
        list(_files(generator, messages)),
    )
    return generator.encode_chat(chat, tools, variables, files)


def _files(generator: TextGenerator, messages: Sequence[Message]) -> Iterator[MediaFile]:
    """Read the images and sounds of a chat.

    Raises:
        RefusedField: One cannot be read, or there are too many.
    """
    parts = [
        (f"messages[{index}].content[{position}].{part.field}", FILE_KINDS[part.field], part.value)
        for index, message in enumerate(messages)
        for position, part in enumerate(message.content or ())
        if part.field in FILE_KINDS
    ]
    for count, (field, kind, value) in enumerate(parts, 1):
        if generator.media is None:
            raise no_media_error(kind, field)
        if count > MAX_FILES:
            raise RefusedField(f"The chat has more than {MAX_FILES} images and sounds.", field)
        yield generator.media.read(kind, value or "", field)
