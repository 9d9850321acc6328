"""`/v1/completions`: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import Prompt, TextPiece, TokenLogprob
from tsx_runtime.features.openai.worker.replies import (
    ChoicesReply,
    ChoicesRequest,
    limit_logprob,
    new_id,
)
from tsx_runtime.features.openai.worker.requests import Choices, Logprobs, read
from tsx_runtime.worker.codecs.bodies import MAX_TOKENS, JsonObject, RefusedField, TokenCount

DEFAULT_TOKENS = 16  # OpenAI's default
MAX_PROMPTS = 64
MAX_TOTAL_CHOICES = 128  # the limit for all prompts together


def _prompt_list(prompt: Any) -> Any:
    """Return a list of prompts from one or several prompts, each as text or tokens.

    Raises:
        ValueError: A prompt is empty, or neither a text nor tokens.
    """
    prompts = (
        prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        else [prompt]
    )
    for item in prompts:
        tokens = [0] if isinstance(item, str) and item else item
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
        list[str | list[int]], BeforeValidator(_prompt_list), Field(max_length=MAX_PROMPTS)
    ]
    max_tokens: TokenCount = None
    logprobs: Logprobs = None
    echo: bool | None = None
    best_of: Choices = None


class CompletionReply(ChoicesReply):
    def __init__(self, body: Any, generator: TextGenerator, model: str) -> None:
        """Read the request and encode its prompts.

        Raises:
            InvalidInput: The body cannot be used.
        """
        request = read(CompletionRequest, body)
        self._n, top_count = request.n or 1, request.logprobs
        count = request.best_of or self._n
        if count < self._n or (request.stream and count > self._n):
            raise RefusedField(
                f"The field 'best_of' is {count}; it must be at least 'n' ({self._n}), and equal to"
                " it in a stream.",
                "best_of",
                code="invalid_value",
            )
        if count * len(request.prompt) > MAX_TOTAL_CHOICES:
            text = (
                f"{len(request.prompt)} prompts with {count} texts each are more than"
                f" {MAX_TOTAL_CHOICES} texts. Send several requests."
            )
            raise RefusedField(text, "n" if request.best_of is None else "best_of")
        if request.echo and top_count is not None:
            raise RefusedField(
                "The fields 'echo' and 'logprobs' do not go together here: prompts have no"
                " logprobs.",
                "echo",
            )
        prompts = [
            generator.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in request.prompt
        ]
        default_max_tokens = max(
            1, min(DEFAULT_TOKENS, generator.context_length - max(map(len, prompts)))
        )
        sampling = request.sampling(
            generator,
            model,
            request.max_tokens or default_max_tokens,
            logprobs=top_count is not None or count > self._n,
            top_logprobs=top_count or 0,
            grammar=request.grammar(request.response_format),
        )
        head = {"id": new_id("cmpl-"), "object": "text_completion", "model": request.model or model}
        super().__init__(request, generator, [*map(Prompt, prompts)], sampling, head, count)
        self._has_logprobs = top_count is not None
        self._echo = [
            generator.decode(continuation.prompt) if request.echo else ""
            for continuation in self.continuations
        ]
        # the number of characters before the next token of each choice
        self._offsets = [0] * len(self._choices)

    def add(self, index: int, piece: TextPiece) -> bytes:
        """Add a piece to a choice, and return its events if the response is streamed."""
        self._choices[index].add(piece)
        if not self.streams:
            return b""
        text, self._echo[index] = self._echo[index] + piece.text, ""
        if not text and not piece.finish_reason and not piece.logprobs:
            return b""
        return self._chunk(self._choice_json(index, text, piece.logprobs, piece.finish_reason))

    def body(self) -> JsonObject:
        choices = []
        for start in range(0, len(self._choices), self._count):
            indexes = [*range(start, start + self._count)]
            if self._count > self._n:
                indexes.sort(key=lambda idx: -self._choices[idx].mean_logprob)
            choices += [
                self._choice_json(
                    idx,
                    self._echo[idx] + choice.text,
                    choice.logprobs if self._has_logprobs else (),
                    choice.finish_reason,
                )
                for idx in indexes[: self._n]
                for choice in [self._choices[idx]]
            ]
        for position, choice_json in enumerate(choices):
            choice_json["index"] = position
        return self._head | {"choices": choices, "usage": self._usage()}

    def _choice_json(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str | None
    ) -> JsonObject:
        return {
            "text": text,
            "index": index,
            "logprobs": self._logprobs_json(index, logprobs),
            "finish_reason": finish_reason,
        }

    def _logprobs_json(self, index: int, logprobs: Sequence[TokenLogprob]) -> JsonObject | None:
        if not logprobs:
            return None
        decode = self._generator.decode
        tokens = [decode([entry.token_id]) for entry in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        tops: list[dict[str, float]] = [{} for _ in logprobs]
        for top, entry in zip(tops, logprobs, strict=True):
            # The most likely token comes first. Several tokens that are parts of characters may
            # decode to the same text, of which the first one is kept.
            for token_id, logprob in entry.top:
                top.setdefault(decode([token_id]), limit_logprob(logprob))
        values = [limit_logprob(entry.logprob) for entry in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
