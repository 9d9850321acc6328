"""Responses to requests for text: the choices of a request, and their server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import (
    FinishReason,
    Media,
    Prompt,
    Sampling,
    TextPiece,
    TokenLogprob,
)
from tsx_runtime.features.openai.worker.formats import ResponseFormat
from tsx_runtime.features.openai.worker.requests import Choices, TextRequest
from tsx_runtime.worker.codecs.bodies import BodyObject, JsonObject

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have


class Continuation(NamedTuple):
    """A prompt and the sampling parameters, for one choice."""

    prompt: list[int]
    sampling: Sampling
    media: Media | None = None


def make_continuations(prompts: Sequence[Prompt], sampling: Sampling, n: int) -> list[Continuation]:
    """Return `n` continuations of each prompt; a given seed is made different for each."""
    seeds = [sampling.seed if sampling.seed is None else sampling.seed + idx for idx in range(n)]
    return [
        Continuation(prompt, replace(sampling, seed=seed), media)
        for prompt, media in prompts
        for seed in seeds
    ]


@dataclass
class Choice:
    """A choice: one generated text, as far as it is complete."""

    parts: list[str] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def mean_logprob(self) -> float:
        return sum(token.logprob for token in self.logprobs) / max(1, len(self.logprobs))

    def add(self, piece: TextPiece) -> None:
        self.parts.append(piece.text)
        self.tokens += piece.tokens
        self.cached_tokens += piece.cached_tokens
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.logprobs += piece.logprobs


def encode_event(data: Any, name: str = "") -> bytes:
    """Encode a server-sent event. The data is one line, since JSON escapes line ends."""
    text = json.dumps(data, separators=(",", ":")).encode()
    return b"event: %b\ndata: %b\n\n" % (name.encode(), text) if name else b"data: %b\n\n" % text


def limit_logprob(logprob: float) -> float:
    """Return a log probability that JSON can represent."""
    return max(logprob, MIN_LOGPROB)


class StreamOptions(BodyObject):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI pads its events; these have no padding.


class ChoicesRequest(TextRequest):
    """The common fields of chat and text completions."""

    n: Choices = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None


class ChoicesReply:
    """The response to a request: `count` choices of each prompt, by default `n`.

    `add` returns the events for a piece of a choice; there are none without streaming.
    """

    def __init__(
        self,
        request: ChoicesRequest,
        generator: TextGenerator,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        head: JsonObject,
        count: int | None = None,
    ) -> None:
        """Create the continuations."""
        self.streams = bool(request.stream)
        self._shows_usage = request.stream_options is not None and bool(
            request.stream_options.include_usage
        )
        self._count = count or request.n or 1
        self.continuations = make_continuations(prompts, sampling, self._count)
        self._generator = generator
        self._choices = [Choice() for _ in self.continuations]
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._head = head | {"created": int(time.time())}
        self.id, self.model = head["id"], head["model"]

    def end(self) -> bytes:
        """Return the last events of a streamed response."""
        return (
            encode_event(self._head | {"choices": [], "usage": self._usage()})
            if self._shows_usage
            else b""
        ) + DONE

    def _chunk(self, choice: JsonObject) -> bytes:
        return encode_event(
            self._head | {"choices": [choice]} | ({"usage": None} if self._shows_usage else {})
        )

    def _usage(self) -> JsonObject:
        completion = sum(choice.tokens for choice in self._choices)
        # Each prompt counts once, as does its part in the cache.
        cached = sum(choice.cached_tokens for choice in self._choices[:: self._count])
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
