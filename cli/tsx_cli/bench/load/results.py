"""The schema of results.json, the results of a benchmark.

Reports, comparisons and `tsx plan` read it. Names of times end in `_ms` (milliseconds) or
`_seconds`, names of sizes in `_mib`. Fractions are from 0 to 1. A reader ignores unknown fields,
and refuses another `format`.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
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

from tsx_archiver import OpenArchive
from tsx_archiver.metadata import slo
from tsx_cli.bench.load.configuration import AS_IS, Configuration, Variant
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.output import plain, rounded


class Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=False)


class Latency(Part):
    """The latency of accepted answers in milliseconds.

    In an open loop it counts from the due time of a request, in a closed loop from its sending.
    """

    mean_ms: float = 0.0
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    p999_ms: float = 0.0
    max_ms: float = 0.0


class StreamFigures(Part):
    """The figures of accepted answers that were event streams; rates are per second.

    TTFT, the time to the first token, counts from the same moment as the latency. TPOT is the time
    per output token: the time from the first to the last token, divided by the tokens after the
    first. Only answers with several tokens have a TPOT.
    """

    answers: int = 0
    tokens: int = (
        0  # generated tokens by `usage` in the last event, or else the number of events with text
    )
    prompt_tokens: int = 0  # 0 if no server reported them
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    goodput: float | None = None  # answers within all time bounds; None if there are none
    ttft: Latency = Latency()
    tpot: Latency = Latency()
    ttft_histogram: list[tuple[float, int]] = Field(default_factory=list)  # see Round.histogram
    tpot_histogram: list[tuple[float, int]] = Field(default_factory=list)


def times_of(latency: Latency, stream: StreamFigures | None) -> dict[str, float]:
    parts = {} if stream is None else {"ttft": stream.ttft, "tpot": stream.tpot}
    stream_times = {
        f"{part}.{name}": value
        for part, times in parts.items()
        for name, value in times.model_dump().items()
    }
    return latency.model_dump() | stream_times


class SizeClass(Part):
    """The accepted answers to inputs of a range of sizes, both ends included."""

    smallest: int  # bytes
    largest: int
    ok: int
    p50_ms: float
    p99_ms: float


class ColdStart(Part):
    """A start of a server.

    The time from the start of its process to readiness includes the loading of the model. The first
    answer follows.
    """

    ready_seconds: float
    first_answer_ms: float | None = None  # None after a refusal


class PinnedCores(Part):
    """The cores of the server and of the generator; none are recorded for a running server."""

    server: list[int]
    generator: list[int]


class Disturbed(Part):
    """The number of disturbed rounds of a run, and their causes."""

    rounds: int = 0  # all rounds
    disturbed: int = 0
    # Disturbed rounds that are ignored, because the same load was also measured undisturbed.
    repeated: int = 0
    others: float = 0.0  # median of the cores that other processes used in disturbed rounds
    says: str = ""  # a summary sentence; empty for a quiet run


# Reasons why a trial was not measured. The highest possible throughput precedes the second one.
OUT_OF_TIME = "the run ended before"
OUTDONE = "less than another does"

FORMAT = 1
CONFIGURATION_FIELDS = {field.name for field in fields(Configuration)}
_CONFIGURATION = TypeAdapter(Configuration)

# JSON has no infinity; null represents it.
InfiniteAsNull = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(
        lambda value: value if math.isfinite(value) else None,
        return_type=float | None,
        when_used="json",
    ),
]


class Figure(Part):
    """A figure and its confidence interval, whose ends are equal after a single repetition."""

    value: float
    low: float
    high: float
    confidence: float = 0.95


class OfferedLoad(Part):
    """The offered load.

    In a closed loop each connection sends its next request after an answer. An open loop sends at a
    fixed rate.
    """

    mode: Literal["closed", "open"] = "closed"
    connections: int = 1
    rate: float | None = None  # requests per second; only an open loop has one
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
    """The figures of the generator itself.

    If `limited` is set, the results describe the generator and not the server.
    """

    cpu: float = 0.0  # fraction of one core
    starved: float = 0.0  # fraction of the time in which it was ready but got no core
    late_p99_ms: float = 0.0  # delay of requests that had a free connection
    waited: int = 0  # requests of an open loop that found no free connection when due
    limited: str | None = None


class Noise(Part):
    """Other activity on the machine during a measurement.

    Fractions are of the time of the measurement. A figure is None if the system does not report it.
    """

    cores: float = 0.0  # cores that the benchmark's own processes used
    others: float = 0.0  # cores that all other processes used
    busiest: str = ""  # name of the process among the others that used the most
    steal: float = 0.0  # fraction that the hypervisor gave to other machines
    throttled: float = 0.0  # fraction in which the container's CPU quota was used up
    # Fraction in which at least one task, of the benchmark or another, waited for a core.
    cpu_pressure: float | None = None
    memory_pressure: float | None = None
    io_pressure: float | None = None
    heat: int = 0  # number of times that a core was slowed down because of its temperature
    mhz: float | None = None  # mean frequency of the cores at the end
    # Time of a fixed computation before or after, as a multiple of the fastest in the run.
    probe: float | None = None


class Round(Part):
    """One repetition of a load, without its warm-up."""

    seconds: float
    sent: int
    ok: int
    refused: int = 0  # statuses 429 and 503
    refused_p99_ms: float = 0.0  # latency of refusals
    errors: dict[str, int] = Field(
        default_factory=dict
    )  # number by status or other outcome, such as `closed`
    unanswered: int = 0
    unsent: int = 0
    throughput: float  # accepted answers per second
    latency: Latency
    # (upper end in ms, answers) of each non-empty bucket.
    histogram: list[tuple[float, int]] = Field(default_factory=list)
    warm_up_seconds: float = 0.0
    # (start, length) in seconds of each time without answers.
    stalls: list[tuple[float, float]] = Field(default_factory=list)
    # In a closed loop with stalls: the p99 that clients arriving at the mean rate would have seen.
    corrected_p99_ms: float | None = None
    # (end in seconds, answers, p50 ms, p99 ms) of intervals of equal length; the warm-up ends at 0.
    over_time: list[tuple[float, int, float, float]] = Field(default_factory=list)
    by_size: list[SizeClass] = Field(default_factory=list)  # empty for inputs of one size
    stream: StreamFigures | None = None  # None if there were no event streams
    generator: GeneratorSide = Field(default_factory=GeneratorSide)
    # A worker's mean time for a request, including the warm-up, if the server reported it.
    busy_ms: float | None = None
    noise: Noise | None = None
    # Each disturbance with its figure and its limit; empty for a quiet round.
    disturbed: list[str] = Field(default_factory=list)


class Point(Part):
    """A load on a configuration, with its figures."""

    offered: OfferedLoad
    throughput: Figure
    latency: Latency  # all rounds together
    p99_ms: Figure
    stream: StreamFigures | None = None
    error_rate: float = 0.0
    holds: bool = True  # whether the bounds hold
    rounds: list[Round] = Field(default_factory=list)

    @property
    def counted(self) -> list[Round]:
        """The rounds on which the figures are based."""
        return counted(self.rounds)

    @property
    def times(self) -> dict[str, float]:
        """Milliseconds by the names of bounds, such as `p99_ms` or `ttft.p99_ms`."""
        return times_of(self.latency, self.stream)


def counted(rounds: Sequence[Round]) -> list[Round]:
    """Return the undisturbed rounds, or all rounds if every one was disturbed."""
    return [round_ for round_ in rounds if not round_.disturbed] or list(rounds)


class Stages(Part):
    """The stages of a request's mean time in milliseconds.

    `transport_ms` is the time that the client measures in addition to the server's stages.
    """

    queue_ms: float = 0.0
    preprocess_ms: float = 0.0
    inference_ms: float = 0.0
    postprocess_ms: float = 0.0
    transport_ms: float = 0.0


class Usage(Part):
    """The usage of the server's processes at one moment."""

    at_seconds: float
    cpu: float  # cores
    memory_mib: float  # shared memory counts once
    gpu: float | None = None  # fraction of the time
    gpu_memory_mib: float | None = None


class Accuracy(Part):
    """A comparison of answers with those of the unchanged archive, one request at a time."""

    same: bool
    compared: int = 0
    different: int = 0
    worst: str | None = None  # the first difference, in words
    accepted: str | None = None  # the verdict of `tsx optimize` that allows a form's differences

    @property
    def allowed(self) -> bool:
        return self.same or self.accepted is not None


class Prediction(Part):
    """A prediction. `p99_ms` is infinite if requests arrive faster than they can be answered."""

    throughput: float
    p99_ms: InfiniteAsNull


class Trial(Part):
    """A configuration and its results."""

    configuration: dict[str, Any]
    state: Literal["measured", "failed", "predicted"] = "measured"
    reason: str | None = None  # why it failed or was not measured
    predicted: Prediction | None = None
    points: list[Point] = Field(default_factory=list)
    best: int | None = None  # position of the point with the most throughput within the bounds
    stages: Stages | None = None  # stages of the best point
    batch_sizes: dict[int, int] = Field(default_factory=dict)  # batches of the best point by size
    usage: list[Usage] = Field(default_factory=list)
    starts: list[ColdStart] = Field(default_factory=list)
    accuracy: Accuracy | None = None

    @property
    def chosen(self) -> Point | None:
        return None if self.best is None else self.points[self.best]

    def as_configuration(self) -> Configuration:
        return Configuration(
            **{
                name: value
                for name, value in self.configuration.items()
                if name in CONFIGURATION_FIELDS
            }
        )


class CurvePoint(Part):
    batch_size: int
    median_ms: float
    low_ms: float
    high_ms: float
    samples: int
    # CPU time on all cores, which limits the number of workers.
    cpu_ms: float | None = None
    # The median times of the handler's steps; None for a step that it does not have.
    preprocess_ms: float | None = None
    inference_ms: float | None = None
    postprocess_ms: float | None = None


class Curve(Part):
    """The times t(n) that one worker takes for batches of n requests, without a server."""

    device: str = "cpu"
    precision: str = AS_IS
    compiled: bool | None = None
    threads: int | None = None
    form: str | None = None
    points: list[CurvePoint] = Field(default_factory=list)
    failed: str | None = None  # the reason why no more points follow
    spread: float = 0.0  # coefficient of variation of a batch's time
    noise: Noise | None = None
    disturbed: list[str] = Field(default_factory=list)  # see Round.disturbed

    @property
    def variant(self) -> Variant:
        return Variant(self.device, self.precision, self.compiled, self.threads, self.form)


class Environment(Part):
    """The machine and the versions.

    Machines with the same `fingerprint` have the same curves.
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
    """A comparison of two trials at their best points, measured in turn.

    `ratio` is the first trial's throughput divided by the second's.
    """

    first: int
    second: int
    ratio: float
    low: float
    high: float
    real: bool  # whether the interval excludes 1


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
    # False after an interruption. A search that its time limit ended is complete.
    complete: bool = True
    command: str = ""
    model: ModelInfo
    against: str | None = None  # the address of a running server
    protocol: str = "tsx"
    slo: str | None = None
    price_per_hour: float | None = None  # price of the measured server
    pinning: PinnedCores | None = None
    environment: Environment
    inputs: Inputs
    curves: list[Curve] = Field(default_factory=list)
    trials: list[Trial] = Field(default_factory=list)
    winner: int | None = None  # recommended trial; the `tied` ones are as fast
    # Trials whose difference from the winner is within the noise.
    tied: list[int] = Field(default_factory=list)
    # Number of configurations that may be faster than all measured ones; there is no winner then.
    faster_unmeasured: int = 0
    baseline: int | None = None  # the trial with one worker and batch size 1
    paired: list[PairedComparison] = Field(default_factory=list)  # the winner with other trials
    disturbed: Disturbed = Field(default_factory=Disturbed)
    why: str = ""  # a sentence or two about the winner
    notes: list[str] = Field(default_factory=list)  # warnings and facts about the figures

    @property
    def winner_leads(self) -> bool:
        """Whether no other configuration with the same answers has a higher throughput."""
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
    """Return the current time in the format of results.json."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def command_line(*secrets: str | None) -> str:
    """Return the command line for the results, with the secrets replaced.

    Bytes that are not valid text are escaped.
    """
    arguments = sys.argv[1:]
    for secret in filter(None, secrets):
        arguments = [argument.replace(secret, "...") for argument in arguments]
    return plain(shlex.join(["tsx", *arguments]))


def model_info(path: Path, archive: OpenArchive) -> ModelInfo:
    size = path.stat().st_size if path.is_file() else None
    return ModelInfo(
        name=archive.manifest.model_name,
        version=archive.manifest.version,
        archive=plain(path.name),
        sha256=archive.digest,
        size_mib=None if size is None else round(size / (1 << 20), 3),
    )


def _finite(text: str) -> float:
    """Parse a finite number.

    Raises:
        ValueError: The text is not a finite number.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number")
    return value


def read_results(path: Path) -> Results:
    """Read results.json.

    Raises:
        CliError: The file is missing, damaged or of another format.
    """
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_finite
        )
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CliError(f"{path} is not a results.json of tsx bench: {error}") from error
    if not isinstance(content, Mapping) or "trials" not in content:
        raise CliError(f"{path} is not a results.json of tsx bench")
    if content.get("format") != FORMAT:
        raise CliError(
            f"{path} is of format {content.get('format')}; this tsx reads format {FORMAT}"
        )
    try:
        results = Results.model_validate(content)
        for trial in results.trials:
            _CONFIGURATION.validate_python(asdict(trial.as_configuration()))
    except ValidationError as error:
        first_error = error.errors()[0]
        raise CliError(
            f"{path} is damaged: {'.'.join(map(str, first_error['loc']))}: {first_error['msg']}"
        ) from error
    trials = [
        results.winner,
        results.baseline,
        *results.tied,
        *(pair.first for pair in results.paired),
        *(pair.second for pair in results.paired),
    ]
    references = [(position, len(results.trials)) for position in trials] + [
        (trial.best, len(trial.points)) for trial in results.trials
    ]
    if any(position is not None and not 0 <= position < count for position, count in references):
        raise CliError(
            f"{path} is damaged: it refers to a trial or a point that it does not contain"
        )
    return results


def parse_slo(text: str) -> slo.Slo:
    """Parse the bounds of `--slo`.

    Raises:
        UsageError: The text is not a list of bounds.
    """
    try:
        return slo.parse_slo(text)
    except ValueError as error:
        raise UsageError(f"--slo: {error}") from error
