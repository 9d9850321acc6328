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
from tsx_runtime.features.openai.worker.requests import TextRequest
from tsx_runtime.worker.codecs.bodies import BodyObject, JsonObject, RefusedField, quote_value

MAX_FILES = 16  # images and sounds in a chat
# The field of the content by the type of a part.
CONTENT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "image_url": "image_url",
    "input_image": "image_url",
    "input_audio": "input_audio",
}
FILE_KINDS: Mapping[str, Kind] = {"image_url": "image", "input_audio": "audio"}


class ContentPart(BodyObject):
    """A text, an image or a sound in a message; images are URLs, and sounds are base64."""

    field: str
    content: str

    @model_validator(mode="before")
    @classmethod
    def _read_content(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        field = CONTENT_FIELDS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise ValueError(f"it must have a type of {', '.join(CONTENT_FIELDS)}")
        content = part.get(field)
        if isinstance(content, dict):  # Chats have an object, and responses a text.
            content = content.get("data" if field == "input_audio" else "url")
        if not isinstance(content, str):
            raise ValueError(f"it has no '{field}'")
        return {"field": field, "content": content}


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
    # Other fields are ignored, but these would change the answer, so only null is accepted.
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("it has no 'content'")
        return self

    def for_template(self) -> JsonObject:
        """Convert the message for a chat template."""
        parts = self.content or []
        content: Any = "".join(part.content for part in parts)
        if any(part.field in FILE_KINDS for part in parts):
            content = [
                {"type": kind, kind: ""}
                if (kind := FILE_KINDS.get(part.field))
                else {"type": "text", "text": part.content}
                for part in parts
            ]
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        } | self.model_dump(
            include={"reasoning_content", "name", "tool_call_id", "tool_calls"},
            exclude_none=True,
        )


class ToolFunction(BodyObject, extra="ignore"):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None


class Tool(BodyObject, extra="ignore"):
    """A tool; `/v1/responses` has the fields of the function next to `type`."""

    type: Literal["function"]
    function: ToolFunction

    @model_validator(mode="before")
    @classmethod
    def _nest_function(cls, tool: Any) -> Any:
        return {"function": tool, **tool} if isinstance(tool, dict) else tool


class ChatFields(TextRequest):
    """The common fields of chats and responses."""

    tools: list[Tool] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: JsonObject = {}


def choose_tools(
    tools: Sequence[Tool], choice: Any, is_parallel: bool = True, grammar: Grammar | None = None
) -> tuple[Sequence[Tool], Grammar | None]:
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
    if choice == "none" or (choice == "auto" and not tools):
        return [], grammar
    names = [tool.function.name for tool in tools]
    mode, chosen_names = choice, names
    try:
        if isinstance(choice, dict):
            allowed = {"mode": "named", "tools": [choice]} | choice.get("allowed_tools", choice)
            mode = allowed["mode"]
            chosen_names = [tool.get("function", tool)["name"] for tool in allowed["tools"]]
    except (AttributeError, KeyError, TypeError):
        mode = None
    chosen_tools = [tool for tool in tools if tool.function.name in chosen_names]
    if (
        mode not in ("auto", "required", "named")
        or not chosen_tools
        or len(chosen_tools) < len(chosen_names)
    ):
        raise RefusedField(
            f"The field 'tool_choice' is {quote_value(choice)}; it must be auto, none, required or"
            f" functions that 'tools' has ({', '.join(names) or 'none'}).",
            "tool_choice",
            code="invalid_value",
        )
    if mode == "auto" and grammar is None:
        return chosen_tools, None
    if grammar is not None and grammar.kind != "json_schema":
        raise RefusedField(
            "With 'tools', the field 'structured_outputs' can only have a JSON schema. Send one, or"
            " no tools.",
            "structured_outputs",
            code="invalid_value",
        )
    schemas: list[JsonObject] = [
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
        for index, tool in enumerate(chosen_tools)
    ]
    if mode == "auto" and grammar is not None:
        schemas.append({"$id": "urn:response"} | json.loads(grammar.text))
    schema: JsonObject = {"anyOf": schemas}
    if is_parallel and mode == "required":
        schema = {"type": "array", "items": schema, "minItems": 1}
    return chosen_tools, Grammar("json_schema", json.dumps(schema), "tools")


def encode_messages(
    generator: TextGenerator,
    messages: Mapping[str, Message],
    tools: Sequence[Tool],
    variables: Mapping[str, Any],
) -> Prompt:
    """Encode a chat by the model's chat template.

    Args:
        generator: The model.
        messages: The messages by their fields in the request.
        tools: The tools for the template.
        variables: Further variables for the template.

    Raises:
        RefusedField: The template ignores the tools, or an image or sound cannot be used.
        InvalidInput: The template refuses the messages.
    """
    return generator.encode_chat(
        [message.for_template() for message in messages.values()],
        [tool.model_dump(exclude_none=True) for tool in tools],
        variables,
        list(_files(generator, messages)),
    )


def _files(generator: TextGenerator, messages: Mapping[str, Message]) -> Iterator[MediaFile]:
    """Read the images and sounds of a chat.

    Raises:
        RefusedField: One cannot be read, or there are too many.
    """
    parts = [
        (
            f"{path}.content[{position}].{part.field}",
            FILE_KINDS[part.field],
            part.content,
        )
        for path, message in messages.items()
        for position, part in enumerate(message.content or ())
        if part.field in FILE_KINDS
    ]
    # Files beyond the limit are refused before the first one is fetched.
    if generator.media is not None and len(parts) > MAX_FILES:
        field = parts[MAX_FILES][0]
        raise RefusedField(f"The chat has more than {MAX_FILES} images and sounds.", field)
    for field, kind, value in parts:
        if generator.media is None:
            raise no_media_error(kind, field)
        yield generator.media.read(kind, value, field)
