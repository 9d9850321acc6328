"""`/v1/responses`: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import TextPiece
from tsx_runtime.features.openai.worker.answer_formats import choose_format
from tsx_runtime.features.openai.worker.formats import PlainFormat, TextFormat
from tsx_runtime.features.openai.worker.messages import ChatFields, Message
from tsx_runtime.features.openai.worker.replies import (
    AnswerPart,
    encode_event,
    make_continuations,
    new_id,
)
from tsx_runtime.features.openai.worker.requests import read
from tsx_runtime.features.openai.worker.tool_calls import Kind
from tsx_runtime.worker.codecs.bodies import BodyObject, JsonObject, RefusedField, TokenCount

# The names of events, which are also those of contents, by the kind of a part.
EVENTS = {
    "content": "output_text",
    "reasoning_content": "reasoning_text",
    "arguments": "function_call_arguments",
}
# The statuses of a response by the finish reason.
STATUSES = {None: "in_progress", "length": "incomplete"}


def _read_item(item: Any) -> Any:
    """Return the message of an item, or None for the model's earlier reasoning.

    Raises:
        ValueError: The item is of another type.
    """
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind == "message":
        return item
    if kind == "reasoning":
        return None
    if kind == "function_call":
        call = {"id": item.get("call_id"), "function": item}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": item.get("call_id"),
            "content": item.get("output"),
        }
    raise ValueError("it must be a message, reasoning, a function_call or a function_call_output")


Input = Annotated[
    list[Annotated[Message | None, BeforeValidator(_read_item)]],
    BeforeValidator(
        lambda text: [{"role": "user", "content": text}] if text and isinstance(text, str) else text
    ),
]


class TextShape(BodyObject):
    format: TextFormat = PlainFormat(type="text")
    verbosity: Literal["medium"] | None = None


class Reasoning(BodyObject):
    effort: str | None = None


class ResponseRequest(ChatFields):
    input: Input
    instructions: str | None = None
    max_output_tokens: TokenCount = None
    text: TextShape = TextShape()
    reasoning: Reasoning = Reasoning()

    def messages(self) -> dict[str, Message]:
        """Return the messages by their fields. A call belongs to the assistant's message before it.

        Raises:
            RefusedField: There is none in the input.
        """
        if not any(self.input):
            raise RefusedField("The field 'input' has no message. Send one.", "input")
        messages: dict[str, Message] = {}
        last = None
        if self.instructions:
            instructions = {"role": "system", "content": self.instructions}
            messages["instructions"] = Message.model_validate(instructions)
        for index, message in enumerate(self.input):
            if message is None:
                continue
            if message.content is None and last is not None and last.role == "assistant":
                last.tool_calls = (last.tool_calls or []) + (message.tool_calls or [])
            else:
                last = messages[f"input[{index}]"] = message
        return messages


class ResponseReply:
    """The response to a request: reasoning, text and function calls.

    It is never stored, even if the request has `"store": true`.
    """

    def __init__(self, body: Any, generator: TextGenerator, model: str) -> None:
        """Read the request and encode its messages.

        Raises:
            InvalidInput: The body cannot be used.
        """
        request = read(ResponseRequest, body)
        text_format = request.text.format
        answers = choose_format(
            generator,
            request,
            request.messages(),
            request.grammar(text_format, "text.format"),
            request.reasoning.effort,
        )
        sampling = request.sampling(generator, model, request.max_output_tokens, **answers.sampling)
        self.streams = bool(request.stream)
        self.continuations = make_continuations([answers.prompt], sampling, 1)
        self._answer = answers.new_answer()
        self._part_index = -1  # the part that is streamed now
        self._event_number = 0
        self.id, self.model = new_id("resp_"), request.model or model
        self._head: JsonObject = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": self.model,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": text_format.model_dump(by_alias=True, exclude_unset=True)},
            "tool_choice": request.tool_choice,
            "tools": [{"type": "function"} | tool.function.model_dump() for tool in request.tools],
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }

    def add(self, index: int, piece: TextPiece) -> bytes:
        """Add a piece to the answer, and return its events if the response is streamed."""
        events = b""
        if self.streams and not self._answer.texts:
            response = {"response": self.body() | {"usage": None}}
            events = self._event("created", response) + self._event("in_progress", response)
        for part, text in self._answer.add_parts(piece):
            if not self.streams:
                continue
            if self._part_index < len(self._answer.parts) - 1:
                events += self._end_part() + self._begin_part(part)
            if text:
                events += self._part_event(f"{EVENTS[part.kind]}.delta", {"delta": text})
        return events

    def end(self) -> bytes:
        """Return the last events of a streamed response."""
        response = self.body()
        return self._end_part() + self._event(response["status"], {"response": response})

    def body(self) -> JsonObject:
        answer, prompt_tokens = self._answer, len(self.continuations[0].prompt)
        status = STATUSES.get(answer.finish_reason, "completed")
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._head | {
            "status": status,
            "incomplete_details": details,
            "output": [
                _item_json(part, status if part is answer.parts[-1] else "completed")
                for part in answer.parts
            ],
            "usage": {
                "input_tokens": prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens},
                "output_tokens": answer.tokens,
                "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
                "total_tokens": prompt_tokens + answer.tokens,
            },
        }

    def _begin_part(self, part: AnswerPart) -> bytes:
        self._part_index += 1
        added = self._part_event("output_item.added", {"item": _item_json(part, "in_progress")})
        return added + self._content_event("added", part, "")

    def _end_part(self) -> bytes:
        if self._part_index < 0:
            return b""
        part = self._answer.parts[self._part_index]
        field = "arguments" if part.kind == "arguments" else "text"
        return (
            self._part_event(f"{EVENTS[part.kind]}.done", {field: part.text})
            + self._content_event("done", part, part.text)
            + self._part_event("output_item.done", {"item": _item_json(part, "completed")})
        )

    def _content_event(self, step: str, part: AnswerPart, text: str) -> bytes:
        if part.kind == "arguments":
            return b""
        return self._part_event(f"content_part.{step}", {"part": _content_json(part.kind, text)})

    def _part_event(self, name: str, data: JsonObject) -> bytes:
        position = {
            "item_id": self._answer.parts[self._part_index].id,
            "output_index": self._part_index,
            "content_index": 0,
            "logprobs": [],
        }
        return self._event(name, position | data)

    def _event(self, name: str, data: JsonObject) -> bytes:
        kind, number = f"response.{name}", self._event_number
        self._event_number += 1
        return encode_event({"type": kind, "sequence_number": number} | data, kind)


def _item_json(part: AnswerPart, status: str) -> JsonObject:
    item = {"id": part.id, "status": status}
    if part.kind == "arguments":
        call = {"call_id": part.id, "name": part.name, "arguments": part.text}
        return item | {"type": "function_call"} | call
    content = [] if status == "in_progress" else [_content_json(part.kind, part.text)]
    kind = (
        {"type": "message", "role": "assistant"}
        if part.kind == "content"
        else {"type": "reasoning", "summary": []}
    )
    return item | kind | {"content": content}


def _content_json(kind: Kind, text: str) -> JsonObject:
    content = {"type": EVENTS[kind], "text": text}
    return content | ({"annotations": [], "logprobs": []} if kind == "content" else {})
