"""The interface between text generators, engines and the wire formats.

The wire formats are `worker/openai` and the one of Hugging Face.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

LONG_BODY_BYTES = 64 << 10
TOKENIZING = ThreadPoolExecutor(1, "tsx-tokenizing")
T = TypeVar("T")

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Sampling:
    """The parameters by which one sequence is continued.

    None stands for the value in the model's generation_config.json, or else for greedy decoding.

    Attributes:
        max_tokens: The largest number of generated tokens.
        temperature: The temperature; 0 is greedy.
        top_p: The share of probability of the tokens to draw from.
        top_k: The number of tokens to draw from.
        seed: The seed of the draws.
        stop: Strings that end the text.
        logprobs: Whether tokens come with their log probability.
        top_logprobs: The number of likely alternatives for each token.
        frequency_penalty: The penalty for each time that a token was generated.
        presence_penalty: The penalty for a token that was generated.
        repetition_penalty: The factor for tokens of the prompt and the generated text.
        logit_bias: A bias for token ids.
        json_schema: The schema of the text as a document; {} is any JSON object.
        adapter: The name of the adapter; None is the base model.
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
    json_schema: Mapping[str, Any] | None = None
    adapter: str | None = None

    @property
    def changes_scores(self) -> bool:
        """Whether penalties or biases change the scores of tokens."""
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
    finished: FinishReason | None = None  # set with the last tokens
    logprobs: Sequence[TokenLogprob] = ()


class TextPiece(NamedTuple):
    """The next piece of a text.

    Joined, the pieces are the whole text. A piece may be empty while a character is incomplete, or
    while a stop string may have begun.
    """

    text: str
    tokens: int  # the number generated since the last piece
    finished: FinishReason | None = None
    logprobs: Sequence[TokenLogprob] = ()
    token_ids: Sequence[int] = ()
    stop: str | None = None  # the stop string that ended the text


class EngineStats(NamedTuple):
    """The load of an engine: numbers of sequences, and the used share of the cache."""

    running: int
    waiting: int
    cache_use: float


class GenerationEngine(Protocol):
    """An engine that runs sequences together; each of them joins and leaves between two steps.

    Attributes:
        context_length: The most tokens of prompt and generated text together. The model sets it, or
            the cache if that holds fewer.
    """

    context_length: int

    @property
    def adapters(self) -> Sequence[str]: ...

    def refusal(self, sampling: Sampling) -> str | None:
        """Explain to a client why this engine cannot serve the parameters; None if it can."""

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Tokens, None]:
        """Continue a prompt; `max_tokens` is set, and the two fit the context.

        Closing the result ends the sequence within one step, and then its cache is free. The result
        raises `EngineDied` once the engine has ended.

        Raises:
            Unavailable: The cache is full and too many sequences wait. It is raised at the call.
        """

    def stats(self) -> EngineStats:
        """Return the load of all adapters together, and the cache use of the fullest one."""

    async def close(self) -> None: ...


async def beside_streams(body: Any, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function, in a thread if the body is long.

    Tokenizing a long text takes a second or more, in which other streams go on. There is only one
    thread.
    """
    if isinstance(body, Sized) and len(body) > LONG_BODY_BYTES:
        return await asyncio.get_running_loop().run_in_executor(TOKENIZING, function, *arguments)
    return function(*arguments)


class TaskRequest(NamedTuple):
    """A request of any wire format, as a task reads it.

    Its form is Hugging Face's `{"inputs": ..., "parameters": {...}}`.
    """

    inputs: Any
    parameters: Mapping[str, Any]


class TaskResult(NamedTuple):
    """The result of a task.

    Attributes:
        output: The result in the shape of Hugging Face's inference API.
        tokens: The number of tokens that the model has read, if it reads any.
    """

    output: Any
    tokens: int = 0
