"""`/v1/responses`, as far as plain text goes. https://platform.openai.com/docs/api-reference/responses"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Any

from tsx_runtime.worker.generation.interface import TextGenerator, TextPiece
from tsx_runtime.worker.openai.fields import Fields
from tsx_runtime.worker.openai.messages import encode, read_messages
from tsx_runtime.worker.openai.sampling import MOST_TOKENS, continuations, read_sampling, read_schema
from tsx_runtime.worker.openai.streams import Choice, event


class ResponseReply:
    """One message of text. Nothing is stored, whatever `store` says."""

    def __init__(self, fields: Fields, generator: TextGenerator, model: str) -> None:
        """Raises InvalidInput."""
        given, instructions = fields.take("input"), fields.text("instructions")
        if given is None or given == "":
            raise fields.missing("input", '"Hello"')
        messages = read_messages([{"role": "user", "content": given}] if isinstance(given, str) else given, "input")
        if instructions:
            messages.insert(0, {"role": "system", "content": instructions})
        limit = fields.whole("max_output_tokens", 1, MOST_TOKENS)
        shape = fields.object("text")
        schema = read_schema(shape.object("format"), "text.format", nested=False) if shape is not None else None
        if shape is not None:
            shape.finish()
        sampling = replace(read_sampling(fields, generator, model, limit), json_schema=schema)
        self.streams = fields.flag("stream")
        tools, choice = fields.take("tools"), fields.choice("tool_choice", "auto", "none")
        if tools:
            raise fields.wrong("tools", tools, "left out: tools are in /v1/chat/completions")
        fields.take("stream_options")  # they have no usage to switch on: it is always there
        fields.finish()
        self.continuations = continuations([encode(generator, messages, ())], sampling, 1, generator)
        self._choice = Choice()
        self._message_id = f"msg_{secrets.token_hex(12)}"
        self._number = 0
        self._head: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "instructions": instructions,
            "max_output_tokens": limit,
            "metadata": {},
            "model": fields.model or model,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text" if schema is None else "json_schema" if schema else "json_object"}},
            "tool_choice": choice,
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }

    def add(self, index: int, piece: TextPiece) -> bytes:
        begins = self._choice.tokens == 0 and self._number == 0
        self._choice.add(piece)
        if not self.streams:
            return b""
        events = self._begin() if begins else b""
        return events + (
            self._event("response.output_text.delta", self._place() | {"delta": piece.text, "logprobs": []}) if piece.text else b""
        )

    def end(self) -> bytes:
        text, item = self._choice.text, self._item("completed")
        return b"".join(
            [
                self._event("response.output_text.done", self._place() | {"text": text, "logprobs": []}),
                self._event("response.content_part.done", self._place() | {"part": _part(text)}),
                self._event("response.output_item.done", {"output_index": 0, "item": item}),
                self._event(f"response.{self._status()}", {"response": self.whole()}),
            ]
        )

    def whole(self) -> dict[str, Any]:
        prompt, tokens = len(self.continuations[0].prompt), self._choice.tokens
        counts = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + tokens,
        }
        status = self._status()
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._head | {"status": status, "incomplete_details": details, "output": [self._item(status)], "usage": counts}

    def _begin(self) -> bytes:
        response = self._head | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        empty = self._item("in_progress") | {"content": []}
        return b"".join(
            [
                self._event("response.created", {"response": response}),
                self._event("response.in_progress", {"response": response}),
                self._event("response.output_item.added", {"output_index": 0, "item": empty}),
                self._event("response.content_part.added", self._place() | {"part": _part("")}),
            ]
        )

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number} | data, kind)

    def _status(self) -> str:
        return "incomplete" if self._choice.finished == "length" else "completed"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str) -> dict[str, Any]:
        content = [_part(self._choice.text)]
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
