"""results.json, the results of a benchmark: the schema that reports, comparisons and `tsx plan`
read.

Times end in `_ms` (milliseconds) or `_seconds`, sizes in `_mib`; shares go from 0 to 1. A reader
passes over what it does not know and refuses another `format`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)

from tsx_archiver.metadata import slo
from tsx_cli.bench.load.configuration import AS_IS, Configuration, Variant
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.output import rounded


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


OUT_OF_TIME = "the run ended before"  # why a trial was not measured
OUTDONE = "less than another does"  # another such reason, after the most that it could do

FORMAT = 1
CONFIGURED = {field.name for field in fields(Configuration)}
_CONFIGURATION = TypeAdapter(Configuration)

Endless = Annotated[  # infinity, which JSON does not have, is null there
    float,
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(
        lambda value: value if math.isfinite(value) else None,
        return_type=float | None,
        when_used="json",
    ),
]


class Figure(Part):
    """A figure and its confidence interval; both ends are the figure itself where there was one
    repetition only.
    """

    value: float
    low: float
    high: float
    confidence: float = 0.95


class OfferedLoad(Part):
    """The load. In a closed loop each connection sends its next request after an answer; an open
    loop has a fixed rate.
    """

    mode: Literal["closed", "open"] = "closed"
    connections: int = 1
    rate: float | None = None  # requests per second, of an open loop
    arrivals: Literal["constant", "poisson", "recorded"] | None = None

    @property
    def short(self) -> str:
        return (
            f"{self.connections} conn." if self.mode == "closed" else f"{rounded(self.rate or 0)}/s"
        )

    def __str__(self) -> str:
        if self.mode == "closed":
            return f"{self.connections} connection{'s' if self.connections != 1 else ''}"
        return (
            f"{rounded(self.rate or 0)} requests/s,"
            f" {'as recorded' if self.arrivals == 'recorded' else self.arrivals}"
        )


class GeneratorSide(Part):
    """The generator's own figures.

    If `limited` is set, the results describe the generator and not the server.
    """

    cpu: float = 0.0  # of one core
    starved: float = 0.0  # share of the time in which it was ready and got no core
    late_p99_ms: float = 0.0  # after the intended time, of requests that a connection was free for
    waited: int = 0  # requests of an open loop that found no free connection when they were due
    limited: str | None = None


class Noise(Part):
    """What else happened on the machine during a measurement.

    Shares are of its time; None where the system does not tell.
    """

    cores: float = 0.0  # that the benchmark's own processes used
    others: float = 0.0  # cores that all other processes used
    busiest: str = ""  # the name of the one of them that used most
    steal: float = 0.0  # share that the hypervisor gave to other machines
    throttled: float = 0.0  # share in which the container's CPU quota was used up
    cpu_pressure: float | None = (
        None  # share in which a task was ready and waited for a core, its own ones included
    )
    memory_pressure: float | None = None
    io_pressure: float | None = None
    heat: int = 0  # times that a core was slowed down for its temperature
    mhz: float | None = None  # mean frequency of the cores, afterwards
    probe: float | None = (
        # times as long as the fastest of the run that a fixed computation took, before and after
        None
    )


class Round(Part):
    """One repetition, without its warm-up."""

    seconds: float
    sent: int
    ok: int
    refused: int = 0  # 429 and 503
    refused_p99_ms: float = 0.0  # their latency
    errors: dict[str, int] = Field(default_factory=dict)  # by status, or `closed`, `timeout`
    unanswered: int = 0
    unsent: int = 0
    throughput: float  # accepted answers per second
    latency: Latency
    histogram: list[tuple[float, int]] = Field(
        default_factory=list
    )  # (upper end in ms, answers) of each bucket that has any
    warm_up_seconds: float = 0.0
    stalls: list[tuple[float, float]] = Field(
        default_factory=list
    )  # (start, length) in seconds of times without any answer
    corrected_p99_ms: float | None = (
        # of a closed loop with stalls: what clients that arrive at the mean rate would have seen
        None
    )
    over_time: list[tuple[float, int, float, float]] = Field(
        default_factory=list
    )  # (end in seconds, answers, p50 ms, p99 ms) of
    # intervals of one length; those of the warm-up end at 0 or before
    by_size: list[SizeClass] = Field(default_factory=list)  # where inputs differ in size
    stream: StreamFigures | None = None  # where answers were event streams
    generator: GeneratorSide = Field(default_factory=GeneratorSide)
    busy_ms: float | None = (
        None  # of a worker for each request, warm-up included, where the server was asked
    )
    noise: Noise | None = None
    disturbed: list[str] = Field(
        default_factory=list
    )  # by what, each with its figure and its limit; empty where it was quiet


class Point(Part):
    """One load on one configuration: a point of the frontier of throughput and latency."""

    offered: OfferedLoad
    throughput: Figure
    latency: Latency  # of all rounds together
    p99_ms: Figure
    stream: StreamFigures | None = None
    error_rate: float = 0.0
    holds: bool = True  # the bounds
    rounds: list[Round] = Field(default_factory=list)

    @property
    def counted(self) -> list[Round]:
        """The rounds that its figures are of."""
        return counted(self.rounds)

    @property
    def times(self) -> dict[str, float]:
        """Milliseconds by the names of bounds: `p99_ms`, and of event streams `ttft.p99_ms`."""
        return times_of(self.latency, self.stream)


def counted(rounds: Sequence[Round]) -> list[Round]:
    """The undisturbed ones, where there are any."""
    return [each for each in rounds if not each.disturbed] or list(rounds)


class Stages(Part):
    """Where the mean time of a request went, in milliseconds; `transport` is what the client saw
    beside the server's own stages.
    """

    queue_ms: float = 0.0
    preprocess_ms: float = 0.0
    inference_ms: float = 0.0
    postprocess_ms: float = 0.0
    transport_ms: float = 0.0


class Usage(Part):
    """The server's processes at one moment."""

    at_seconds: float
    cpu: float  # cores
    memory_mib: float  # what is shared counted once
    gpu: float | None = None  # share of the time
    gpu_memory_mib: float | None = None


class Accuracy(Part):
    """The answers compared with those of the unchanged archive, one request at a time."""

    same: bool
    compared: int = 0
    different: int = 0
    worst: str | None = None  # the first difference, in words
    accepted: str | None = (
        None  # the verdict of `tsx optimize` by which the answers of a form may differ
    )

    @property
    def allowed(self) -> bool:
        return self.same or self.accepted is not None


class Prediction(Part):
    """`p99_ms` is infinite if requests arrive faster than they can be answered."""

    throughput: float
    p99_ms: Endless


class Trial(Part):
    """A configuration and its results."""

    configuration: dict[str, Any]
    state: Literal["measured", "failed", "predicted"] = "measured"
    reason: str | None = None  # why it failed, or why it was not measured
    predicted: Prediction | None = None
    points: list[Point] = Field(default_factory=list)
    best: int | None = None  # of the points: the most throughput within the bounds
    stages: Stages | None = None  # at the best point
    batch_sizes: dict[int, int] = Field(
        default_factory=dict
    )  # batches by their size, at the best point
    usage: list[Usage] = Field(default_factory=list)
    starts: list[ColdStart] = Field(default_factory=list)
    accuracy: Accuracy | None = None

    @property
    def chosen(self) -> Point | None:
        return None if self.best is None else self.points[self.best]

    def as_configuration(self) -> Configuration:
        return Configuration(
            **{name: value for name, value in self.configuration.items() if name in CONFIGURED}
        )


class CurvePoint(Part):
    batch_size: int
    median_ms: float
    low_ms: float
    high_ms: float
    samples: int
    cpu_ms: float | None = (
        # of all cores together; beside the time it tells how many workers the cores suffice for
        None
    )
    preprocess_ms: float | None = (
        None  # of the median time, by the handler's steps; None for a step that it does not have
    )
    inference_ms: float | None = None
    postprocess_ms: float | None = None


class Curve(Part):
    """t(n): how long one worker takes for a batch of n requests, measured in its process, without a
    server.
    """

    device: str = "cpu"
    precision: str = AS_IS
    compiled: bool | None = None
    threads: int | None = None
    form: str | None = None
    points: list[CurvePoint] = Field(default_factory=list)
    failed: str | None = None  # why there are no more points
    spread: float = 0.0  # coefficient of variation of a batch's time: its noise
    noise: Noise | None = None
    disturbed: list[str] = Field(default_factory=list)  # as a round's

    @property
    def variant(self) -> Variant:
        return Variant(self.device, self.precision, self.compiled, self.threads, self.form)


class Environment(Part):
    """The machine and the versions.

    `fingerprint` is the same where a curve from one tells of another.
    """

    fingerprint: str
    cpu: str = ""
    cores: int = 1
    memory_mib: int = 0
    gpus: list[str] = Field(default_factory=list)
    system: str = ""
    python: str = ""
    torch: str = ""
    tsx: str = ""
    noise: float | None = None  # coefficient of variation of a fixed computation, repeated


class Inputs(Part):
    """The inputs that were sent."""

    source: str
    count: int  # different requests
    content_types: dict[str, int] = Field(default_factory=dict)
    smallest: int = 0  # bytes
    median: int = 0
    largest: int = 0


class PairedComparison(Part):
    """Two trials at their best points, measured in turn: how many times the second's throughput the
    first's is, and how sure that is.
    """

    first: int
    second: int
    ratio: float
    low: float
    high: float
    real: bool  # 1 is outside of the interval


class ModelInfo(Part):
    name: str
    version: str | None = None
    archive: str | None = None
    sha256: str | None = None
    size_mib: float | None = None


class Results(Part):
    format: int = FORMAT
    started: str  # ISO 8601, with the offset
    ended: str | None = None
    # False: interrupted. A search that its time limit ended is complete, and its trials say so
    complete: bool = True
    command: str = ""
    model: ModelInfo
    against: str | None = None  # the address, where a running server was measured
    protocol: str = "tsx"
    slo: str | None = None
    price_per_hour: float | None = None  # of one such server
    pinning: PinnedCores | None = None
    environment: Environment
    inputs: Inputs
    curves: list[Curve] = Field(default_factory=list)
    trials: list[Trial] = Field(default_factory=list)
    winner: int | None = None  # with `tied` it is recommended, and no faster than they are
    tied: list[int] = Field(
        default_factory=list
    )  # trials whose difference from the winner is within the noise
    # configurations that are expected to be faster than all measured ones; with any there is no
    # winner
    faster_unmeasured: int = 0
    baseline: int | None = None  # one worker, batch size 1
    paired: list[PairedComparison] = Field(default_factory=list)  # the winner and others
    disturbed: Disturbed = Field(default_factory=Disturbed)
    why: str = ""  # the winner, in a sentence or two
    notes: list[str] = Field(default_factory=list)  # what a reader of the figures must know

    @property
    def winner_leads(self) -> bool:
        """Check that no other configuration with the same answers has a higher throughput."""
        chosen = None if self.winner is None else self.trials[self.winner].chosen
        rivals = [
            trial.chosen
            for trial in self.trials
            if trial.accuracy is None or trial.accuracy.allowed
        ]
        return chosen is not None and all(
            chosen.throughput.value >= rival.throughput.value
            for rival in rivals
            if rival is not None
        )


def now() -> str:
    """As results have a moment."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _finite(text: str) -> float:
    """Raises ValueError."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number")
    return value


def read_results(path: Path) -> Results:
    """Raises CliError where it is none."""
    try:
        given = json.loads(
            path.read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_finite
        )
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CliError(f"{path} is not a results.json of tsx bench: {error}") from error
    if not isinstance(given, Mapping) or "trials" not in given:
        raise CliError(f"{path} is not a results.json of tsx bench")
    if given.get("format") != FORMAT:
        raise CliError(f"{path} is of format {given.get('format')}; this tsx reads format {FORMAT}")
    try:
        found = Results.model_validate(given)
        for trial in found.trials:
            _CONFIGURATION.validate_python(asdict(trial.as_configuration()))
    except ValidationError as error:
        first = error.errors()[0]
        raise CliError(
            f"{path} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
    trials = [
        found.winner,
        found.baseline,
        *found.tied,
        *(each.first for each in found.paired),
        *(each.second for each in found.paired),
    ]
    places = [(at, len(found.trials)) for at in trials] + [
        (trial.best, len(trial.points)) for trial in found.trials
    ]
    if any(at is not None and not 0 <= at < count for at, count in places):
        raise CliError(
            f"{path} is damaged: it refers to a trial or a point that it does not contain"
        )
    return found


def parse_slo(text: str) -> slo.Slo:
    """Raises UsageError."""
    try:
        return slo.parse_slo(text)
    except ValueError as error:
        raise UsageError(f"--slo: {error}") from error
