"""Responses to requests for text: the choices of a request, and their server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import (
    FinishReason,
    Media,
    Prompt,
    Sampling,
    TextPiece,
    TokenLogprob,
)
from tsx_runtime.features.openai.worker.formats import PlainFormat, ResponseFormat
from tsx_runtime.features.openai.worker.requests import Choices, TextRequest
from tsx_runtime.features.openai.worker.tool_calls import AnswerParser, Kind
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

    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, piece: TextPiece) -> None:
        self.texts.append(piece.text)
        self.tokens += piece.tokens
        self.cached_tokens += piece.cached_tokens
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.logprobs += piece.logprobs


@dataclass
class AnswerPart:
    """A part of an answer: content, reasoning, or a call, whose text is the arguments.

    Attributes:
        kind: The kind of `text`.
        name: The name of the called function.
        id: The id of the call. Mistral's templates require nine characters.
    """

    kind: Kind
    name: str = ""
    text: str = ""
    id: str = field(default_factory=lambda: new_id("")[:9])


@dataclass
class ParsedChoice(Choice):
    """A choice whose text is parsed into parts, of which there is at least one."""

    parser: AnswerParser = field(kw_only=True)
    parts: list[AnswerPart] = field(default_factory=list)

    @property
    def calls(self) -> list[AnswerPart]:
        return [part for part in self.parts if part.kind == "arguments"]

    def text_of(self, kind: Kind) -> str | None:
        texts = [part.text for part in self.parts if part.kind == kind]
        return "".join(texts) if texts else None

    def add_parts(self, piece: TextPiece) -> Iterator[tuple[AnswerPart, str]]:
        """Add a piece, and yield the parts that it changes and their new text.

        The new text is empty at the beginning of a call.
        """
        self.add(piece)
        was_reasoning = self.parser.is_reasoning
        pieces = self.parser.push(piece.text, is_last=piece.finish_reason is not None)
        if was_reasoning or self.parser.is_reasoning:
            self.reasoning_tokens += piece.tokens
        if piece.finish_reason and not (pieces or self.parts):
            pieces.append(("content", ""))
        for kind, text in pieces:
            if kind == "name":
                self.parts.append(AnswerPart("arguments", text))
                text = ""
            elif not self.parts or kind != self.parts[-1].kind:
                self.parts.append(AnswerPart(kind))
            self.parts[-1].text += text
            yield self.parts[-1], text


def encode_event(data: Any, name: str = "") -> bytes:
    """Encode a server-sent event. The data is one line, since JSON escapes line ends."""
    text = json.dumps(data, separators=(",", ":")).encode()
    return b"event: %b\ndata: %b\n\n" % (name.encode(), text) if name else b"data: %b\n\n" % text


def limit_logprob(logprob: float) -> float:
    """Return a log probability that JSON can represent."""
    return max(logprob, MIN_LOGPROB)


class StreamOptions(BodyObject):
    include_usage: bool = False
    include_obfuscation: bool = False  # OpenAI pads its events; these have no padding.


class ChoicesRequest(TextRequest):
    """The common fields of chat and text completions."""

    n: Choices = None
    response_format: ResponseFormat = PlainFormat(type="text")
    stream_options: StreamOptions = StreamOptions()


ChoiceT = TypeVar("ChoiceT", bound=Choice)


class ChoicesReply(Generic[ChoiceT]):
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
        new_choice: Callable[[], ChoiceT],
        count: int | None = None,
    ) -> None:
        """Create the continuations."""
        self.streams = bool(request.stream)
        self._shows_usage = request.stream_options.include_usage
        self._count = count or request.n or 1
        self.continuations = make_continuations(prompts, sampling, self._count)
        self._generator = generator
        self._choices = [new_choice() for _ in self.continuations]
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
        reasoning = sum(choice.reasoning_tokens for choice in self._choices)
        # Each prompt counts once, as does its part in the cache.
        cached = sum(choice.cached_tokens for choice in self._choices[:: self._count])
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
