"""`/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import TextPiece, TokenLogprob
from tsx_runtime.features.openai.worker.answer_formats import choose_format
from tsx_runtime.features.openai.worker.messages import ChatFields, Message
from tsx_runtime.features.openai.worker.replies import (
    AnswerPart,
    ChoicesReply,
    ChoicesRequest,
    ParsedChoice,
    limit_logprob,
    new_id,
)
from tsx_runtime.features.openai.worker.requests import Logprobs, read
from tsx_runtime.worker.codecs.bodies import JsonObject, RefusedField, TokenCount


class ChatRequest(ChatFields, ChoicesRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenCount = None
    max_tokens: TokenCount = None
    logprobs: bool | None = None
    top_logprobs: Logprobs = None
    reasoning_effort: str | None = None


class ChatReply(ChoicesReply[ParsedChoice]):
    def __init__(self, body: Any, generator: TextGenerator, model: str) -> None:
        """Read the request and encode its messages.

        Raises:
            InvalidInput: The body cannot be used.
        """
        request = read(ChatRequest, body)
        if request.top_logprobs and not request.logprobs:
            raise RefusedField("The field 'top_logprobs' needs 'logprobs': true.", "top_logprobs")
        answers = choose_format(
            generator,
            request,
            {f"messages[{index}]": message for index, message in enumerate(request.messages)},
            request.grammar(request.response_format, "response_format"),
            request.reasoning_effort,
        )
        sampling = request.sampling(
            generator,
            model,
            request.max_completion_tokens or request.max_tokens,
            logprobs=bool(request.logprobs),
            top_logprobs=request.top_logprobs or 0,
            **answers.sampling,
        )
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        head = {"id": new_id("chatcmpl-"), "object": kind, "model": request.model or model}
        super().__init__(request, generator, [answers.prompt], sampling, head, answers.new_answer)
        choice = request.tool_choice
        self._names_function = isinstance(choice, dict) and "function" in choice

    def add(self, index: int, piece: TextPiece) -> bytes:
        """Add a piece to a choice, and return its events if the response is streamed."""
        answer = self._choices[index]
        deltas = [] if answer.texts else [{"role": "assistant", "content": ""}]
        deltas += [_delta_json(answer, part, text) for part, text in answer.add_parts(piece)]
        # OpenAI's reason is "stop" for a call of a function that the request names.
        if answer.calls and piece.finish_reason == "stop" and not self._names_function:
            answer.finish_reason = "tool_calls"
        if not self.streams:
            return b""
        if piece.logprobs and not deltas:
            deltas.append({"content": ""})
        choices = [self._choice_json(index, {"delta": delta}) for delta in deltas]
        if choices:
            choices[-1]["logprobs"] = self._logprobs_json(piece.logprobs)
        if piece.finish_reason:
            choices.append(self._choice_json(index, {"delta": {}}, (), answer.finish_reason))
        return b"".join(map(self._chunk, choices))

    def body(self) -> JsonObject:
        choices = [
            self._choice_json(
                index, {"message": _message_json(answer)}, answer.logprobs, answer.finish_reason
            )
            for index, answer in enumerate(self._choices)
        ]
        return self._head | {"choices": choices, "usage": self._usage()}

    def _choice_json(
        self,
        index: int,
        content: JsonObject,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> JsonObject:
        head = {"index": index, **content, "logprobs": self._logprobs_json(logprobs)}
        return head | {"finish_reason": finish_reason}

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


def _delta_json(answer: ParsedChoice, part: AnswerPart, text: str) -> JsonObject:
    if part.kind != "arguments":
        return {part.kind: text}
    call = {"function": {"arguments": text}} if part.text else _call_json(part)
    return {"tool_calls": [{"index": len(answer.calls) - 1} | call]}


def _message_json(answer: ParsedChoice) -> JsonObject:
    reasoning, calls = answer.text_of("reasoning_content"), [*map(_call_json, answer.calls)]
    return (
        {"role": "assistant", "content": answer.text_of("content"), "refusal": None}
        | ({"reasoning_content": reasoning} if reasoning else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _call_json(call: AnswerPart) -> JsonObject:
    function = {"name": call.name, "arguments": call.text}
    return {"id": call.id, "type": "function", "function": function}
