"""Responses to requests for text: the choices of a request, and their server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import (
    ANY_JSON_OBJECT,
    FinishReason,
    Grammar,
    Media,
    Prompt,
    Sampling,
    TextPiece,
    TokenLogprob,
)
from tsx_runtime.features.openai.worker.requests import Choices, TextRequest
from tsx_runtime.worker.codecs.bodies import BodyObject, JsonObject, RefusedField

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have


class Continuation(NamedTuple):
    """A prompt and the sampling parameters, for one choice."""

    prompt: list[int]
    sampling: Sampling
    media: Media | None = None


def make_continuations(
    prompts: Sequence[Prompt], sampling: Sampling, n: int, generator: TextGenerator
) -> list[Continuation]:
    """Return `n` continuations of each prompt; a given seed is made different for each.

    Raises:
        RefusedField: The model's context is too short.
    """
    context_length = generator.context_length
    for prompt, _ in prompts:
        if len(prompt) + (sampling.max_tokens or 1) > context_length:
            requested_tokens = (
                "at least one" if sampling.max_tokens is None else sampling.max_tokens
            )
            text = (
                f"The prompt has {len(prompt)} tokens, and {requested_tokens} may follow, but the"
                f" model's context has {context_length} for both."
            )
            raise RefusedField(
                f"{text} Shorten the prompt, or ask for fewer.", code="context_length_exceeded"
            )
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
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, piece: TextPiece) -> None:
        self.parts.append(piece.text)
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.logprobs += piece.logprobs


def encode_event(data: Any, name: str = "") -> bytes:
    """Encode a server-sent event. The data is one line, since JSON escapes line ends."""
    text = json.dumps(data, separators=(",", ":")).encode()
    return b"event: %b\ndata: %b\n\n" % (name.encode(), text) if name else b"data: %b\n\n" % text


def limit_logprob(logprob: float) -> float:
    """Return a log probability that JSON can represent."""
    return max(logprob, MIN_LOGPROB)


class TextFormat(BodyObject):
    """The format of the generated text.

    `/v1/responses` uses this form. In chats, the schema is in a nested object.
    """

    type: Literal["text", "json_object", "json_schema"]
    definition: JsonObject | None = Field(None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.definition is None:
            raise ValueError("it has no schema; send a JSON schema in its field 'schema'")
        return self


def grammar_of(format: TextFormat | None) -> Grammar | None:
    """Return the grammar of the text, or None for any text."""
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return ANY_JSON_OBJECT
    return Grammar("json_schema", json.dumps(format.definition))


def _flatten_schema(format: Any) -> Any:
    if not isinstance(format, dict):
        return format
    definition = format.get("json_schema")
    return {
        **(definition if isinstance(definition, dict) else {}),
        **{name: value for name, value in format.items() if name != "json_schema"},
    }


class StreamOptions(BodyObject):
    include_usage: bool | None = None


class ChoicesRequest(TextRequest):
    """The common fields of chat and text completions."""

    n: Choices = None
    response_format: Annotated[TextFormat, BeforeValidator(_flatten_schema)] | None = None
    stream_options: StreamOptions | None = None


class ChoicesReply:
    """The response to a request: `n` choices of each prompt.

    `add` returns the events for a piece of a choice; there are none without streaming.
    """

    def __init__(
        self,
        request: ChoicesRequest,
        generator: TextGenerator,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        head: JsonObject,
    ) -> None:
        """Create the continuations.

        Raises:
            RefusedField: The model's context is too short.
        """
        self.streams = bool(request.stream)
        self._shows_usage = request.stream_options is not None and bool(
            request.stream_options.include_usage
        )
        self.continuations = make_continuations(prompts, sampling, request.n or 1, generator)
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

    def _usage(self) -> dict[str, int]:
        completion = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
