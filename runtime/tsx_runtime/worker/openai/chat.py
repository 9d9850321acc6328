"""`/v1/chat/completions`. https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tsx_runtime.worker.generation.interface import TextGenerator, TextPiece, TokenLogprob
from tsx_runtime.worker.openai.errors import RefusedField
from tsx_runtime.worker.openai.fields import Fields
from tsx_runtime.worker.openai.messages import encode, read_messages, read_tools, schema_of_call
from tsx_runtime.worker.openai.sampling import MOST_CHOICES, MOST_LOGPROBS, MOST_TOKENS, read_sampling, read_schema
from tsx_runtime.worker.openai.streams import Choice, ChoicesReply, finite
from tsx_runtime.worker.openai.tool_calls import ToolText


class ChatReply(ChoicesReply):
    def __init__(self, fields: Fields, generator: TextGenerator, model: str) -> None:
        """Raises InvalidInput."""
        messages = read_messages(fields.take("messages"), "messages")
        tools, wanted = read_tools(fields)
        limits = [fields.whole(name, 1, MOST_TOKENS) for name in ("max_completion_tokens", "max_tokens")]
        schema = read_schema(fields.object("response_format"), "response_format", nested=True)
        if wanted is not None:
            schema = schema_of_call(tools, wanted)
        logprobs, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MOST_LOGPROBS) or 0
        if top and not logprobs:
            raise RefusedField("The field 'top_logprobs' needs 'logprobs': true.", "top_logprobs")
        sampling = read_sampling(fields, generator, model, limits[0] or limits[1])
        sampling = replace(sampling, logprobs=logprobs, top_logprobs=top, json_schema=schema)
        n = fields.whole("n", 1, MOST_CHOICES) or 1
        super().__init__(fields, generator, model, "chatcmpl", [encode(generator, messages, tools)], sampling, n)
        self._head["object"] = "chat.completion.chunk" if self.streams else "chat.completion"
        names = [tool["function"]["name"] for tool in tools]
        self._tool_texts = [ToolText(names) for _ in range(n)] if tools else []

    def add(self, index: int, piece: TextPiece) -> bytes:
        choice = self._choices[index]
        begins, text = not choice.parts, piece.text
        choice.add(piece)
        if not self.streams:
            return b""
        events: list[bytes] = []
        calls: list[dict[str, Any]] = []
        if begins:
            events.append(self._delta(index, {"role": "assistant", "content": ""}))
        if self._tool_texts:
            text = self._tool_texts[index].add(text)
            if piece.finished:
                rest, calls = self._tool_texts[index].end()
                text += rest
        if text or piece.logprobs:
            events.append(self._delta(index, {"content": text}, piece.logprobs))
        if calls:
            events.append(self._delta(index, {"tool_calls": [{"index": idx} | call for idx, call in enumerate(calls)]}))
        if piece.finished:
            events.append(self._delta(index, {}, finished="tool_calls" if calls else piece.finished))
        return b"".join(events)

    def whole(self) -> dict[str, Any]:
        return self._head | {"choices": [self._whole(idx, choice) for idx, choice in enumerate(self._choices)], "usage": self._usage()}

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        finished = choice.finished
        if self._tool_texts:
            shown = self._tool_texts[index].add(choice.text)
            rest, calls = self._tool_texts[index].end()
            if calls:
                message |= {"content": (shown + rest).strip() or None, "tool_calls": calls}
                finished = "tool_calls"
        return {"index": index, "message": message, "logprobs": self._logprobs(choice.logprobs), "finish_reason": finished}

    def _delta(self, index: int, delta: dict[str, Any], logprobs: Sequence[TokenLogprob] = (), finished: str | None = None) -> bytes:
        return self._chunk({"index": index, "delta": delta, "logprobs": self._logprobs(logprobs), "finish_reason": finished})

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        content = [
            self._token(each.token_id, each.logprob) | {"top_logprobs": [self._token(*other) for other in each.top]} for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._generator.decode([token_id])
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
