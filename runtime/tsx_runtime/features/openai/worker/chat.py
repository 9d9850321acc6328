"""`/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import TextPiece, TokenLogprob
from tsx_runtime.features.openai.worker.messages import Message, Tool, choose_tools, encode_messages
from tsx_runtime.features.openai.worker.replies import (
    ChoicesReply,
    ChoicesRequest,
    limit_logprob,
    new_id,
)
from tsx_runtime.features.openai.worker.requests import Logprobs, read
from tsx_runtime.features.openai.worker.tool_calls import ToolText
from tsx_runtime.worker.codecs.bodies import JsonObject, RefusedField, TokenCount


class ChatRequest(ChoicesRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenCount = None
    max_tokens: TokenCount = None
    logprobs: bool | None = None
    top_logprobs: Logprobs = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class ChatReply(ChoicesReply):
    def __init__(self, body: Any, generator: TextGenerator, model: str) -> None:
        """Read the request and encode its messages.

        Raises:
            InvalidInput: The body cannot be used.
        """
        request = read(ChatRequest, body)
        if request.top_logprobs and not request.logprobs:
            raise RefusedField("The field 'top_logprobs' needs 'logprobs': true.", "top_logprobs")
        tools, grammar = choose_tools(
            request.tools or (),
            request.tool_choice,
            request.parallel_tool_calls is not False,
            request.grammar(request.response_format),
        )
        sampling = request.sampling(
            generator,
            model,
            request.max_completion_tokens or request.max_tokens,
            logprobs=bool(request.logprobs),
            top_logprobs=request.top_logprobs or 0,
            grammar=grammar,
        )
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        head = {"id": new_id("chatcmpl-"), "object": kind, "model": request.model or model}
        super().__init__(
            request,
            generator,
            [encode_messages(generator, request.messages, tools, request.chat_template_kwargs)],
            sampling,
            head,
        )
        names = [tool["function"]["name"] for tool in tools]
        self._tool_texts = [ToolText(names) for _ in self._choices] if tools else []
        self._calls: list[list[JsonObject]] = [[] for _ in self._choices]

    def add(self, index: int, piece: TextPiece) -> bytes:
        """Add a piece to a choice, and return its events if the response is streamed."""
        choice = self._choices[index]
        is_first = not choice.parts
        if self._tool_texts:
            piece = self._hold_back_calls(index, piece)
        choice.add(piece)
        if not self.streams:
            return b""
        events = (
            [self._delta_event(index, {"role": "assistant", "content": ""})] if is_first else []
        )
        if piece.text or piece.logprobs:
            events.append(self._delta_event(index, {"content": piece.text}, piece.logprobs))
        if calls := self._calls[index]:
            events.append(
                self._delta_event(
                    index, {"tool_calls": [{"index": idx} | call for idx, call in enumerate(calls)]}
                )
            )
        if piece.finish_reason:
            events.append(self._delta_event(index, {}, finish_reason=piece.finish_reason))
        return b"".join(events)

    def body(self) -> JsonObject:
        choices = []
        for index, (choice, calls) in enumerate(zip(self._choices, self._calls, strict=True)):
            message: JsonObject = {"role": "assistant", "content": choice.text, "refusal": None}
            if calls:
                message |= {"content": choice.text.strip() or None, "tool_calls": calls}
            choice_json = {
                "index": index,
                "message": message,
                "logprobs": self._logprobs_json(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            choices.append(choice_json)
        return self._head | {"choices": choices, "usage": self._usage()}

    def _hold_back_calls(self, index: int, piece: TextPiece) -> TextPiece:
        """Remove tool calls from a piece; they are sent with the last piece."""
        tools = self._tool_texts[index]
        piece = piece._replace(text=tools.add(piece.text))
        if not piece.finish_reason:
            return piece
        remaining, self._calls[index] = tools.end()
        return piece._replace(
            text=piece.text + remaining,
            finish_reason="tool_calls" if self._calls[index] else piece.finish_reason,
        )

    def _delta_event(
        self,
        index: int,
        delta: JsonObject,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> bytes:
        return self._chunk(
            {
                "index": index,
                "delta": delta,
                "logprobs": self._logprobs_json(logprobs),
                "finish_reason": finish_reason,
            }
        )

    def _logprobs_json(self, logprobs: Sequence[TokenLogprob]) -> JsonObject | None:
        if not logprobs:
            return None
        content = [
            self._token_json(token.token_id, token.logprob)
            | {"top_logprobs": [self._token_json(*candidate) for candidate in token.top]}
            for token in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token_json(self, token_id: int, logprob: float) -> JsonObject:
        data = self._generator.token_bytes(token_id)
        # OpenAI writes a byte of an incomplete character as `\xe2`, in these four characters.
        text = data.decode(errors="backslashreplace")
        return {"token": text, "logprob": limit_logprob(logprob), "bytes": list(data)}
