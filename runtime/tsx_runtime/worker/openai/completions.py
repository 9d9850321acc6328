"""`/v1/completions`. https://platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tsx_runtime.worker.codecs.bodies import MAX_TOKENS, JsonObject, RefusedField, TokenCount
from tsx_runtime.worker.generation.generator import TextGenerator
from tsx_runtime.worker.generation.interface import TextPiece, TokenLogprob
from tsx_runtime.worker.openai.replies import (
    ChoicesReply,
    ChoicesRequest,
    finite,
    new_id,
    schema_of,
)
from tsx_runtime.worker.openai.requests import Logprobs, read

USUAL_TOKENS = 16  # of an answer whose request names no number, as OpenAI has it
MOST_PROMPTS = 64
MOST_TOGETHER = 128  # choices of all prompts


def _several(given: Any) -> Any:
    """A string, a list of strings, the tokens of one prompt, or of several. Raises ValueError."""
    prompts = (
        given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    )
    for each in prompts:
        tokens = [0] if isinstance(each, str) and each else each
        if (
            not isinstance(tokens, list)
            or not tokens
            or not all(type(token) is int and 0 <= token < MAX_TOKENS for token in tokens)
        ):
            raise ValueError(
                "it must be a text that is not empty, tokens, or a list of one of them"
            )
    return prompts


class CompletionRequest(ChoicesRequest):
    prompt: Annotated[
        list[str | list[int]], BeforeValidator(_several), Field(max_length=MOST_PROMPTS)
    ]
    max_tokens: TokenCount = None
    logprobs: Logprobs = None
    echo: bool | None = None


class CompletionReply(ChoicesReply):
    def __init__(self, body: Any, generator: TextGenerator, model: str) -> None:
        """Raises InvalidInput."""
        request = read(CompletionRequest, body)
        n, top = request.n or 1, request.logprobs
        if n * len(request.prompt) > MOST_TOGETHER:
            text = (
                f"{len(request.prompt)} prompts with n = {n} are more than {MOST_TOGETHER} texts."
                " Send several requests."
            )
            raise RefusedField(text, "n")
        if request.echo and top is not None:
            raise RefusedField(
                "The fields 'echo' and 'logprobs' do not go together here: prompts have no"
                " logprobs.",
                "echo",
            )
        prompts = [
            generator.encode(each) if isinstance(each, str) else each for each in request.prompt
        ]
        usual = max(1, min(USUAL_TOKENS, generator.context_length - max(map(len, prompts))))
        schema = schema_of(request.response_format)
        sampling = request.sampling(
            generator,
            model,
            request.max_tokens or usual,
            logprobs=top is not None,
            top_logprobs=top or 0,
            json_schema=schema,
        )
        head = {"id": new_id("cmpl-"), "object": "text_completion", "model": request.model or model}
        super().__init__(request, generator, prompts, sampling, head)
        self._echo = [
            generator.decode(each.prompt) if request.echo else "" for each in self.continuations
        ]
        self._offsets = [0] * len(self._choices)  # characters before the next token

    def add(self, index: int, piece: TextPiece) -> bytes:
        self._choices[index].add(piece)
        if not self.streams:
            return b""
        text, self._echo[index] = self._echo[index] + piece.text, ""
        if not text and not piece.finished and not piece.logprobs:
            return b""
        return self._chunk(self._shown(index, text, piece.logprobs, piece.finished))

    def whole(self) -> JsonObject:
        choices = [
            self._shown(idx, self._echo[idx] + choice.text, choice.logprobs, choice.finished)
            for idx, choice in enumerate(self._choices)
        ]
        return self._head | {"choices": choices, "usage": self._usage()}

    def _shown(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], finished: str | None
    ) -> JsonObject:
        return {
            "text": text,
            "index": index,
            "logprobs": self._logprobs(index, logprobs),
            "finish_reason": finished,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> JsonObject | None:
        if not logprobs:
            return None
        decode = self._generator.decode
        tokens = [decode([each.token_id]) for each in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        tops: list[dict[str, float]] = [{} for _ in logprobs]
        for top, each in zip(tops, logprobs, strict=True):
            for (
                other,
                logprob,
            ) in each.top:  # the likeliest first: parts of characters may all read the same
                top.setdefault(decode([other]), finite(logprob))
        values = [finite(each.logprob) for each in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
