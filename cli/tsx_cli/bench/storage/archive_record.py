"""`tsx-bench.json` of an archive: the measurements of `tsx bench --write`, for `tsx serve`, `tsx plan` and people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tsx_archiver import read_member
from tsx_cli.bench.generator.result import BUSY
from tsx_cli.bench.model.configuration import Configuration
from tsx_cli.bench.model.parts import Part
from tsx_cli.bench.model.results import Curve, Environment, Inputs, ModelInfo, Observation, OfferedLoad, Results, Round
from tsx_cli.bench.model.statistics import merged, percentile
from tsx_cli.common.failure import CliError
from tsx_cli.common.options import archive_limits
from tsx_runtime.core.models.benchmark_record import FILE, FORMAT, LARGEST
from tsx_runtime.core.placement.hardware import hardware

QUANTILES = 200  # of what is noted of a distribution


class Best(Part):
    """The winner's figures at the highest load within the bounds."""

    configuration: dict[str, Any]
    describes: str  # the configuration in words
    offered: OfferedLoad
    throughput: float
    p50_ms: float
    p99_ms: float


class ArchiveRecord(Part):
    format: int = FORMAT
    measured: str  # ISO 8601, with the offset
    tsx: str
    environment: Environment
    model: ModelInfo
    slo: str | None = None
    protocol: str = "tsx"
    inputs: Inputs
    best: Best
    baseline: Best | None = None  # one worker, batch size 1
    curves: list[Curve] = Field(default_factory=list)
    loads: list[Observation] = Field(default_factory=list)  # every round of the winner: what a server adds to its curve
    alone_ms: list[float] = Field(default_factory=list)  # latencies of one request at a time on one worker: quantiles, evenly apart
    transport_ms: float | None = None  # between client and worker then

    @property
    def here(self) -> bool:
        """Whether this machine computes as the one that it was measured on."""
        return self.environment.fingerprint == hardware().fingerprint

    def as_best(self) -> Observation:
        """All that is known of its loads where their rounds were not kept."""
        how, best = Configuration(**self.best.configuration), self.best
        return Observation(
            workers=how.workers,
            batch_size=how.batch_size,
            offered=best.offered,
            throughput=best.throughput,
            p50_ms=best.p50_ms,
            p99_ms=best.p99_ms,
        )

    def content(self) -> bytes:
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False).encode() + b"\n"


def read_record(archive: Path) -> ArchiveRecord | None:
    """What an archive or a model's directory has of it; None where it was never measured. Raises CliError for a damaged one."""
    content = read_member(archive, FILE, most=LARGEST, limits=archive_limits())
    if content is None:
        return None
    try:
        given = json.loads(content)
        if isinstance(given, dict) and given.get("format") != FORMAT:
            message = f"{FILE} is of format {given.get('format')}, and this tsx reads format {FORMAT}"
            raise CliError(f"{archive}: {message}; measure again: tsx bench {archive} --write")
        return ArchiveRecord.model_validate(given)
    except (ValueError, ValidationError, RecursionError) as error:
        raise CliError(f"{archive}: {FILE} is damaged; measure again: tsx bench {archive} --write") from error


def record_of(results: Results, curves: list[Curve] | None = None) -> ArchiveRecord:
    """What is kept of a run that has a winner."""
    assert results.winner is not None
    best, baseline = _best(results, results.winner), None if results.baseline is None else _best(results, results.baseline)
    if best is None:
        raise CliError("the winner has no measured point, so there is nothing to keep")
    alone, transport = alone_of(results)
    return ArchiveRecord(
        measured=results.ended or results.started,
        tsx=results.environment.tsx,
        environment=results.environment,
        model=results.model,
        slo=results.slo,
        protocol=results.protocol,
        inputs=results.inputs,
        best=best,
        baseline=baseline,
        curves=results.curves if curves is None else curves,
        loads=loads_of(results),
        alone_ms=alone,
        transport_ms=transport,
    )


def loads_of(results: Results) -> list[Observation]:
    """Of the winner, round by round."""
    assert results.winner is not None
    trial = results.trials[results.winner]
    rounds = [(point.offered, each) for point in trial.points for each in point.counted]
    return [observation_of(trial.how(), offered, each) for offered, each in rounds if each.ok == each.sent and tells(offered, each)]


def tells(offered: OfferedLoad, round: Round) -> bool:
    """Whether its latencies are the server's: those of an open loop are its generator's where that had no time left."""
    return offered.mode == "closed" or round.generator.cpu + round.generator.starved <= BUSY


def observation_of(configuration: Configuration, offered: OfferedLoad, round: Round) -> Observation:
    return Observation(
        workers=configuration.workers,
        batch_size=configuration.batch_size,
        offered=offered,
        throughput=round.throughput,
        p50_ms=round.latency.p50_ms,
        p99_ms=round.latency.p99_ms,
        served=round.served,
    )


def quantiles_of(rounds: Sequence[Round]) -> list[float]:
    """Milliseconds, evenly apart; of nothing none."""
    histogram = merged([each.histogram for each in rounds])
    return [round(percentile(histogram, (number + 0.5) / QUANTILES), 4) for number in range(QUANTILES)] if histogram else []


def alone_of(results: Results) -> tuple[list[float], float | None]:
    """Latencies of one request at a time on one worker, as quantiles, and that worker's transport; nothing where it was not measured.

    The winner's variant goes before the baseline's: it is their noise that counts, not how long they took."""
    variant = None if results.winner is None else results.trials[results.winner].how().variant
    for trial in sorted(results.trials, key=lambda each: each.how().variant != variant):
        if trial.how().workers != 1 or trial.state != "measured":
            continue
        found = [point for point in trial.points if point.offered.mode == "closed" and point.offered.connections == 1]
        if found and (quantiles := quantiles_of(found[0].counted)):
            return quantiles, None if trial.stages is None else trial.stages.transport_ms
    return [], None


def _best(results: Results, number: int) -> Best | None:
    trial = results.trials[number]
    point = trial.chosen
    if point is None:
        return None
    return Best(
        configuration=trial.configuration,
        describes=str(trial.how()),
        offered=point.offered,
        throughput=point.throughput.value,
        p50_ms=point.latency.p50_ms,
        p99_ms=point.p99_ms.value,
    )
