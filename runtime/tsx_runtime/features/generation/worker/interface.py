"""The interface between text generators, their engines and the wire formats.

The wire formats are OpenAI's (`features/openai/worker`) and Hugging Face's (`native`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

LONG_BODY_BYTES = 64 << 10
TOKENIZING_EXECUTOR = ThreadPoolExecutor(1, "tsx-tokenizing")
# Downloads may take long, and other users of asyncio's own threads must not wait for them.
MEDIA_EXECUTOR = ThreadPoolExecutor(32, "tsx-media")
ResultT = TypeVar("ResultT")

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class Grammar(NamedTuple):
    """A grammar that a generated text must follow.

    Attributes:
        kind: The language of `text`.
        text: A JSON schema as JSON, a regular expression, a JSON list of texts to choose from, or a
            context-free grammar in the notation of Lark.
        field: The field of the request that has the grammar.
    """

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str
    field: str | None = None


class Media(NamedTuple):
    """The images and sounds of a prompt.

    Attributes:
        features: The tensors of the model's processor by the name of their argument, such as
            `pixel_values`.
        digest: A hash of the contents. Prompts with different media share no cache.
    """

    features: Mapping[str, Any]
    digest: bytes


class Prompt(NamedTuple):
    """A prompt; media are at its placeholder tokens."""

    token_ids: list[int]
    media: Media | None = None


@dataclass(frozen=True)
class Sampling:
    """The parameters for the continuation of one sequence.

    None means the value in the model's generation_config.json, or else greedy decoding.

    Attributes:
        max_tokens: The largest number of generated tokens.
        temperature: The temperature; 0 means greedy decoding.
        top_p: The total probability of the most likely tokens to draw from.
        top_k: The number of the most likely tokens to draw from.
        seed: The seed of the random numbers.
        stop: The strings at which the text ends.
        logprobs: Whether the log probability of each token is returned.
        top_logprobs: The number of likely alternatives for each token.
        frequency_penalty: The penalty for each previous occurrence of a token in the generated
            text.
        presence_penalty: The penalty for a token that the generated text contains.
        repetition_penalty: The factor for tokens that the prompt or the generated text contains.
        logit_bias: The bias of each token id.
        grammar: The grammar that the text must follow.
        adapter: The name of the adapter; None for the base model.
        visible_tokens: The special tokens that the text contains; others are left out.
        cache_salt: Prompts with different salts share no cache, so that the time to the first token
            does not tell what others have asked.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    grammar: Grammar | None = None
    adapter: str | None = None
    visible_tokens: frozenset[str] = frozenset()
    cache_salt: str = ""

    @property
    def changes_scores(self) -> bool:
        """Whether a penalty or bias changes the scores of tokens."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.logit_bias
        ) or self.repetition_penalty not in (None, 1)


class TokenLogprob(NamedTuple):
    """The log probability of a token, and those of the most likely tokens."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


class Tokens(NamedTuple):
    """The next tokens of a sequence from an engine."""

    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None  # set only with the last tokens
    logprobs: Sequence[TokenLogprob] = ()
    cached_tokens: int = 0  # tokens of the prompt that were in the cache; set with the first tokens


class TextPiece(NamedTuple):
    """The next piece of a generated text.

    All pieces together are the whole text. A piece is empty while a character is incomplete, or
    while the text may be the beginning of a stop string.
    """

    text: str
    tokens: int  # the number of tokens since the previous piece
    finish_reason: FinishReason | None = None
    logprobs: Sequence[TokenLogprob] = ()
    token_ids: Sequence[int] = ()
    stop: str | None = None  # the stop string that ended the text
    cached_tokens: int = 0  # tokens of the prompt from the cache; set in the first piece


class EngineStats(NamedTuple):
    """The load of an engine: numbers of sequences, and the used fraction of the cache."""

    running: int
    waiting: int
    cache_use: float


class GenerationEngine(Protocol):
    """An engine that generates several sequences together. They join and leave between two steps.

    Attributes:
        context_length: The largest number of tokens of prompt and generated text together: the
            limit of the model or of the cache, whichever is smaller.
    """

    context_length: int

    @property
    def adapters(self) -> Sequence[str]: ...

    async def add_adapter(self, name: str, directory: Path) -> None:
        """Add a PEFT adapter, or replace the one of this name, while sequences run.

        Raises:
            LoadError: The adapter cannot be served; the adapters are as before.
        """

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter; its memory is free once its sequences have ended."""

    def refusal(self, sampling: Sampling) -> str | None:
        """Explain to a client why this engine cannot serve the parameters; None if it can."""

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, media: Media | None = None
    ) -> AsyncGenerator[Tokens, None]:
        """Continue a prompt. `max_tokens` must be set, and fit the context with the prompt.

        When the generator is closed, the sequence ends within one step and its cache is freed. The
        generator raises `EngineDied` once the engine has ended.

        Raises:
            Unavailable: The cache is full and too many sequences wait. The call itself raises it.
        """

    def stats(self) -> EngineStats:
        """Return the sequences of all adapters together, and the largest cache use among them."""

    async def close(self) -> None: ...


async def run_without_blocking_streams(
    body: Any, function: Callable[..., ResultT], *arguments: Any, may_have_media: bool = False
) -> ResultT:
    """Call a function; if it may take long, call it in another thread.

    Tokenizing a long text takes a second or more, which would block other streams. All long bodies
    share one thread. A small body may have the URL of a file, or an image of many pixels, so bodies
    that may have media share other threads.
    """
    if may_have_media:
        executor = MEDIA_EXECUTOR
    elif isinstance(body, Sized) and len(body) > LONG_BODY_BYTES:
        executor = TOKENIZING_EXECUTOR
    else:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)


class TaskRequest(NamedTuple):
    """A request in the form that tasks read, whatever its wire format is.

    The form is Hugging Face's `{"inputs": ..., "parameters": {...}}`.
    """

    inputs: Any
    parameters: Mapping[str, Any]


class TaskResult(NamedTuple):
    """The result of a task.

    Attributes:
        output: The result in the shape of Hugging Face's inference API.
        tokens: The number of tokens that the model has read; 0 for models without tokens.
    """

    output: Any
    tokens: int = 0
