"""Parts of results.json that stand for themselves: latencies, event streams, classes of inputs by
size, starts of a server, cores.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=False)


class Latency(Part):
    """Of accepted answers, in milliseconds: from the intended sending time in an open loop, from
    the sending in a closed one.
    """

    mean_ms: float = 0.0
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    p999_ms: float = 0.0
    max_ms: float = 0.0


class StreamFigures(Part):
    """Accepted answers that were event streams, as text generation has them.

    Rates are of one second.

    TTFT, the time to the first token, counts from where the latency does; TPOT, the time per output
    token, is the time from the first to the last token divided by the tokens after the first, of
    answers that have several.
    """

    answers: int = 0
    tokens: int = (
        0  # that were generated: as `usage` of the last event says, else the events with text
    )
    prompt_tokens: int = 0  # 0 where no server told
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    goodput: float | None = (
        None  # answers that kept each bound of time by themselves; None without such a bound
    )
    ttft: Latency = Latency()
    tpot: Latency = Latency()
    ttft_histogram: list[tuple[float, int]] = Field(default_factory=list)  # as a round's
    tpot_histogram: list[tuple[float, int]] = Field(default_factory=list)


def times_of(latency: Latency, stream: StreamFigures | None) -> dict[str, float]:
    parts = {} if stream is None else {"ttft": stream.ttft, "tpot": stream.tpot}
    named = {
        f"{part}.{name}": value
        for part, times in parts.items()
        for name, value in times.model_dump().items()
    }
    return latency.model_dump() | named


class SizeClass(Part):
    """Accepted answers to inputs of these sizes, both ends included."""

    smallest: int  # bytes
    largest: int
    ok: int
    p50_ms: float
    p99_ms: float


class ColdStart(Part):
    """One start of a server: from its process to being ready, the model's loading included, and its
    first answer after that.
    """

    ready_seconds: float
    first_answer_ms: float | None = None  # None: it was refused


class PinnedCores(Part):
    """The cores of both sides; those of the server are empty where it was running already."""

    server: list[int]
    generator: list[int]


class Disturbed(Part):
    """How many rounds of a run were disturbed, and by what."""

    rounds: int = 0  # in all
    disturbed: int = 0
    # of the disturbed ones: they do not count, as the same load was measured undisturbed as well
    repeated: int = 0
    others: float = 0.0  # the median cores that other processes used in the disturbed ones
    says: str = ""  # all that in a sentence; empty for a quiet run
