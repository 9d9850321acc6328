"""What generators and engines of text agree on, and what the wire formats (`worker/openai`, Hugging
Face's own) make of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

LONG = 64 << 10  # bytes of a body
TOKENIZING = ThreadPoolExecutor(1, "tsx-tokenizing")
T = TypeVar("T")

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Sampling:
    """How one sequence is continued.

    None: as the model's generation_config.json says, else greedily.
    """

    max_tokens: int | None = None
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0  # of each token, the most likely others
    frequency_penalty: float = 0.0  # each time that a token was generated
    presence_penalty: float = 0.0  # a token that was generated
    repetition_penalty: float | None = None  # the factor for tokens of prompt and answer
    logit_bias: Mapping[int, float] | None = None  # keyed by token id
    json_schema: Mapping[str, Any] | None = (
        None  # the text is a document of this schema; {}: any JSON object
    )
    adapter: str | None = None

    @property
    def changes_scores(self) -> bool:
        return bool(
            self.frequency_penalty or self.presence_penalty or self.logit_bias
        ) or self.repetition_penalty not in (None, 1)


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


class Tokens(NamedTuple):
    """The next ones of a sequence, as an engine gives them."""

    token_ids: Sequence[int]
    finished: FinishReason | None = None  # of the last ones
    logprobs: Sequence[TokenLogprob] = ()


class TextPiece(NamedTuple):
    """The next piece of a text.

    Joined, the pieces are the whole text; one may be empty while a character is incomplete or a
    stop string may have begun.
    """

    text: str
    tokens: int  # that were generated since the last piece
    finished: FinishReason | None = None
    logprobs: Sequence[TokenLogprob] = ()
    token_ids: Sequence[int] = ()
    stop: str | None = None  # the stop string that ended it


class EngineStats(NamedTuple):
    running: int  # sequences
    waiting: int
    cache_use: float  # 0 to 1


class GenerationEngine(Protocol):
    """Runs sequences together; each joins and leaves between two steps."""

    # tokens of prompt and answer together: those of the model, or of the cache where it holds fewer
    context_length: int

    @property
    def adapters(self) -> Sequence[str]: ...

    def refusal(self, sampling: Sampling) -> str | None:
        """Why this cannot be had of this engine, as a sentence for a client; None where it can."""

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Tokens, None]:
        """`max_tokens` is given, and the two fit the context.

        A plain function: it raises `Unavailable` at the call where the cache has
        no room and too much waits. Closing what it returns ends the sequence within one step, and
        its cache is free when that returns.

        What it returns raises `EngineDied` once the engine has.
        """

    def stats(self) -> EngineStats:
        """Of all adapters together; of the cache the fullest, where each has its own."""

    async def close(self) -> None: ...


async def beside_streams(body: Any, function: Callable[..., T], *arguments: Any) -> T:
    """Tokenizing what is long takes a second or more, in which others' streams go on: in a thread,
    of which there is one.
    """
    if isinstance(body, Sized) and len(body) > LONG:
        return await asyncio.get_running_loop().run_in_executor(TOKENIZING, function, *arguments)
    return function(*arguments)


class TaskRequest(NamedTuple):
    """A request of any wire format, as a task reads it (Hugging Face's `{"inputs": ...,
    "parameters": {...}}`).
    """

    inputs: Any
    parameters: Mapping[str, Any]


class TaskResult(NamedTuple):
    """`output` is in the shape of Hugging Face's own inference API; `tokens` those that the model
    read, where it reads any.
    """

    output: Any
    tokens: int = 0
