"""`/v1/responses` for plain text: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import TextPiece
from tsx_runtime.features.openai.worker.formats import TextFormat
from tsx_runtime.features.openai.worker.messages import Message, encode_messages
from tsx_runtime.features.openai.worker.replies import (
    Choice,
    encode_event,
    make_continuations,
    new_id,
)
from tsx_runtime.features.openai.worker.requests import TextRequest, read
from tsx_runtime.worker.codecs.bodies import (
    BodyObject,
    JsonObject,
    RefusedField,
    TokenCount,
    quote_value,
)


def _message_list(content: Any) -> Any:
    """Return the messages of an input, leaving out the model's earlier reasoning.

    Raises:
        RefusedField: An item is neither a message nor reasoning.
    """
    if content and isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not isinstance(content, list):
        return content
    messages = []
    for index, item in enumerate(content):
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind == "message":
            messages.append(item)
        elif kind != "reasoning":
            text = (
                f"The field 'input[{index}]' is of type {quote_value(kind)}, which is not supported"
                " here. Send messages of text only"
            )
            raise RefusedField(
                f"{text}; /v1/chat/completions takes tool calls.",
                f"input[{index}]",
                code="invalid_value",
            )
    return messages


Input = Annotated[list[Message], BeforeValidator(_message_list), Field(min_length=1)]


class TextShape(BodyObject):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(BodyObject):
    effort: Literal["none", "medium"] | None = None


class ResponseRequest(TextRequest):
    input: Input
    instructions: str | None = None
    max_output_tokens: TokenCount = None
    text: TextShape | None = None
    tool_choice: Literal["auto", "none"] | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: JsonObject | None = None


class ResponseReply:
    """The response to a request: one message of text.

    It is never stored, even if the request has `"store": true`.
    """

    def __init__(self, body: Any, generator: TextGenerator, model: str) -> None:
        """Read the request and encode its messages.

        Raises:
            InvalidInput: The body cannot be used.
        """
        request = read(ResponseRequest, body)
        messages = request.input
        if request.instructions:
            messages = [
                Message.model_validate({"role": "system", "content": request.instructions}),
                *messages,
            ]
        text_format = request.text.format if request.text is not None else None
        sampling = request.sampling(
            generator, model, request.max_output_tokens, grammar=request.grammar(text_format)
        )
        self.streams = bool(request.stream)
        self.continuations = make_continuations(
            [encode_messages(generator, messages, variables=request.chat_template_kwargs)],
            sampling,
            1,
        )
        self._choice = Choice()
        self._message_id = new_id("msg_")
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
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {
                "format": {"type": "text"}
                if text_format is None
                else text_format.model_dump(by_alias=True, exclude_none=True)
            },
            "tool_choice": request.tool_choice or "auto",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }

    def add(self, index: int, piece: TextPiece) -> bytes:
        """Add a piece to a choice, and return its events if the response is streamed."""
        events = self._first_events() if self.streams and not self._choice.parts else b""
        self._choice.add(piece)
        if self.streams and piece.text:
            events += self._event(
                "response.output_text.delta",
                self._position() | {"delta": piece.text, "logprobs": []},
            )
        return events

    def end(self) -> bytes:
        """Return the last events of a streamed response."""
        text, item = self._choice.text, self._item("completed")
        return b"".join(
            [
                self._event(
                    "response.output_text.done", self._position() | {"text": text, "logprobs": []}
                ),
                self._event(
                    "response.content_part.done", self._position() | {"part": _text_part(text)}
                ),
                self._event("response.output_item.done", {"output_index": 0, "item": item}),
                self._event(f"response.{self._status()}", {"response": self.body()}),
            ]
        )

    def body(self) -> JsonObject:
        prompt, tokens = len(self.continuations[0].prompt), self._choice.tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._choice.cached_tokens},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + tokens,
        }
        status = self._status()
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._head | {
            "status": status,
            "incomplete_details": details,
            "output": [self._item(status)],
            "usage": usage,
        }

    def _first_events(self) -> bytes:
        response = self._head | {
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        empty = self._item("in_progress") | {"content": []}
        return b"".join(
            [
                self._event("response.created", {"response": response}),
                self._event("response.in_progress", {"response": response}),
                self._event("response.output_item.added", {"output_index": 0, "item": empty}),
                self._event(
                    "response.content_part.added", self._position() | {"part": _text_part("")}
                ),
            ]
        )

    def _event(self, kind: str, data: JsonObject) -> bytes:
        number, self._event_number = self._event_number, self._event_number + 1
        return encode_event({"type": kind, "sequence_number": number} | data, kind)

    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _position(self) -> JsonObject:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str) -> JsonObject:
        content = [_text_part(self._choice.text)]
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }


def _text_part(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
