"""`/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import FinishReason, TextPiece, TokenLogprob
from tsx_runtime.features.openai.worker.answer_formats import choose_format
from tsx_runtime.features.openai.worker.messages import Message, Tool, choose_tools, encode_messages
from tsx_runtime.features.openai.worker.replies import (
    ChoicesReply,
    ChoicesRequest,
    limit_logprob,
    new_id,
)
from tsx_runtime.features.openai.worker.requests import Logprobs, read
from tsx_runtime.features.openai.worker.tool_calls import AnswerParser
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


@dataclass
class AssistantMessage:
    """The message of a choice, as far as it is complete."""

    parser: AnswerParser
    content: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    tool_calls: list[JsonObject] = field(default_factory=list)

    def add(self, piece: TextPiece) -> list[JsonObject]:
        """Add a piece, and return the changes of the message, as in the chunks of a stream."""
        was_reasoning = self.parser.is_reasoning
        deltas = self.parser.push(piece.text, is_last=piece.finish_reason is not None)
        if was_reasoning or self.parser.is_reasoning:
            self.reasoning_tokens += piece.tokens
        for delta in deltas:
            self.content += delta.get("content", "")
            self.reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    self.tool_calls.append(
                        {name: value for name, value in call.items() if name != "index"}
                        | {"function": {**call["function"]}}
                    )
                else:
                    self.tool_calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        return deltas

    def to_json(self) -> JsonObject:
        is_text = not (self.tool_calls or self.reasoning)
        return (
            {
                "role": "assistant",
                "content": self.content if self.content or is_text else None,
                "refusal": None,
            }
            | ({"reasoning_content": self.reasoning} if self.reasoning else {})
            | ({"tool_calls": self.tool_calls} if self.tool_calls else {})
        )


class ChatReply(ChoicesReply):
    def __init__(self, body: Any, generator: TextGenerator, model: str) -> None:
        """Read the request and encode its messages.

        Raises:
            InvalidInput: The body cannot be used.
        """
        request = read(ChatRequest, body)
        if request.top_logprobs and not request.logprobs:
            raise RefusedField("The field 'top_logprobs' needs 'logprobs': true.", "top_logprobs")
        is_parallel = request.parallel_tool_calls is not False
        tools, grammar = choose_tools(
            request.tools or (),
            request.tool_choice,
            is_parallel,
            request.grammar(request.response_format),
        )
        prompt = encode_messages(generator, request.messages, tools, request.chat_template_kwargs)
        answers = choose_format(
            generator,
            prompt,
            tools,
            has_grammar=grammar is not None,
            allows_several_calls=is_parallel,
        )
        sampling = request.sampling(
            generator,
            model,
            request.max_completion_tokens or request.max_tokens,
            logprobs=bool(request.logprobs),
            top_logprobs=request.top_logprobs or 0,
            grammar=grammar,
            visible_tokens=answers.visible_tokens,
        )
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        head = {"id": new_id("chatcmpl-"), "object": kind, "model": request.model or model}
        super().__init__(request, generator, [answers.prompt], sampling, head)
        self._messages = [AssistantMessage(answers.new_parser()) for _ in self._choices]
        # OpenAI's reason is "stop" for a call of a function that the request names.
        self._call_reason: FinishReason = (
            "stop" if isinstance(request.tool_choice, dict) else "tool_calls"
        )

    def add(self, index: int, piece: TextPiece) -> bytes:
        """Add a piece to a choice, and return its events if the response is streamed."""
        choice, message = self._choices[index], self._messages[index]
        deltas = message.add(piece)
        if message.tool_calls and piece.finish_reason == "stop":
            piece = piece._replace(finish_reason=self._call_reason)
        if not choice.parts:
            deltas.insert(0, {"role": "assistant", "content": ""})
        choice.add(piece)
        if not self.streams:
            return b""
        if piece.logprobs and (not deltas or "role" in deltas[-1]):
            deltas.append({"content": ""})
        events = [
            self._delta_event(index, delta, piece.logprobs if idx == len(deltas) - 1 else ())
            for idx, delta in enumerate(deltas)
        ]
        if piece.finish_reason:
            events.append(self._delta_event(index, {}, finish_reason=piece.finish_reason))
        return b"".join(events)

    def body(self) -> JsonObject:
        choices = [
            {
                "index": index,
                "message": message.to_json(),
                "logprobs": self._logprobs_json(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, (choice, message) in enumerate(
                zip(self._choices, self._messages, strict=True)
            )
        ]
        return self._head | {"choices": choices, "usage": self._usage()}

    def _usage(self) -> JsonObject:
        reasoning_tokens = sum(message.reasoning_tokens for message in self._messages)
        details = {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
        return super()._usage() | (details if reasoning_tokens else {})

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
