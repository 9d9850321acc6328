"""`/v1/completions`: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import Prompt, TextPiece, TokenLogprob
from tsx_runtime.features.openai.worker.replies import (
    Choice,
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


@dataclass
class Completion(Choice):
    """A choice whose text may begin with the prompt.

    Attributes:
        echo: The prompt, until it is streamed.
        chars: The number of characters before the next token.
    """

    echo: str = ""
    chars: int = 0

    @property
    def mean_logprob(self) -> float:
        return sum(token.logprob for token in self.logprobs) / max(1, len(self.logprobs))


class CompletionReply(ChoicesReply[Completion]):
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
            grammar=request.grammar(request.response_format, "response_format"),
        )
        head = {"id": new_id("cmpl-"), "object": "text_completion", "model": request.model or model}
        super().__init__(
            request, generator, [*map(Prompt, prompts)], sampling, head, Completion, count
        )
        self._has_logprobs = top_count is not None
        if request.echo:
            for choice, continuation in zip(self._choices, self.continuations, strict=True):
                choice.echo = generator.decode(continuation.prompt)

    def add(self, index: int, piece: TextPiece) -> bytes:
        """Add a piece to a choice, and return its events if the response is streamed."""
        choice = self._choices[index]
        choice.add(piece)
        has_news = choice.echo or piece.text or piece.finish_reason or piece.logprobs
        if not self.streams or not has_news:
            return b""
        return self._chunk(self._choice_json(index, choice, piece))

    def body(self) -> JsonObject:
        choices: list[Completion] = []
        for start in range(0, len(self._choices), self._count):
            candidates = self._choices[start : start + self._count]
            if self._count > self._n:
                candidates.sort(key=lambda choice: -choice.mean_logprob)
            choices += candidates[: self._n]
        choices_json = [
            self._choice_json(index, choice, choice) for index, choice in enumerate(choices)
        ]
        return self._head | {"choices": choices_json, "usage": self._usage()}

    def _choice_json(
        self, index: int, choice: Completion, text: Completion | TextPiece
    ) -> JsonObject:
        echo, choice.echo = choice.echo, ""
        return {
            "text": echo + text.text,
            "index": index,
            "logprobs": self._logprobs_json(choice, text.logprobs) if self._has_logprobs else None,
            "finish_reason": text.finish_reason,
        }

    def _logprobs_json(
        self, choice: Completion, logprobs: Sequence[TokenLogprob]
    ) -> JsonObject | None:
        if not logprobs:
            return None
        offsets = []
        for entry in logprobs:
            offsets.append(choice.chars)
            # A character begins with each byte that does not continue one.
            data = self._generator.token_bytes(entry.token_id)
            choice.chars += sum(byte >> 6 != 0b10 for byte in data)
        return {
            "tokens": [self._token_text(entry.token_id) for entry in logprobs],
            "token_logprobs": [limit_logprob(entry.logprob) for entry in logprobs],
            # Of several tokens with the same text, the first and most likely one is kept.
            "top_logprobs": [
                {
                    self._token_text(token_id): limit_logprob(logprob)
                    for token_id, logprob in reversed(entry.top)
                }
                for entry in logprobs
            ],
            "text_offset": offsets,
        }

    def _token_text(self, token_id: int) -> str:
        data = self._generator.token_bytes(token_id)
        text = data.decode(errors="backslashreplace")
        # OpenAI writes parts of characters as `bytes:\xe2\x80`.
        return text if text.encode() == data else f"bytes:{text}"
