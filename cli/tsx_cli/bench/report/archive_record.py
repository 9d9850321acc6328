"""The record `tsx-bench.json` in an archive: the measurements of `tsx bench --write`.

`tsx serve`, `tsx plan` and people read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field, ValidationError

from tsx_archiver import read_member
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import (
    Curve,
    Environment,
    Inputs,
    ModelInfo,
    OfferedLoad,
    Part,
    Point,
    Results,
    Trial,
)
from tsx_cli.common.failure import CliError
from tsx_cli.common.options import archive_limits
from tsx_runtime.core.models.benchmark_record import FILE, FORMAT, MAX_RECORD_BYTES
from tsx_runtime.core.placement.hardware import hardware


class Best(Part):
    """The winner's figures at its highest load within the bounds."""

    configuration: dict[str, Any]
    describes: str  # description of the configuration
    offered: OfferedLoad
    throughput: float
    p50_ms: float
    p99_ms: float


class MeasuredLoad(Point):
    """A load on one configuration."""

    configuration: dict[str, Any]
    utilisation: float | None = None  # fraction of the time in which the workers were busy

    @property
    def as_configuration(self) -> Configuration:
        return Configuration(**self.configuration)


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
    curves: list[Curve] = Field(default_factory=list)
    points: list[MeasuredLoad] = Field(default_factory=list)  # the loads of all configurations

    @property
    def here(self) -> bool:
        """Whether this machine has the same hardware as the measured one."""
        return self.environment.fingerprint == hardware().fingerprint

    def content(self) -> bytes:
        return (
            json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False).encode() + b"\n"
        )


def read_record(archive: Path) -> ArchiveRecord | None:
    """Return the record of an archive or a model's directory, or None if it was never measured.

    Raises:
        CliError: The record is damaged.
    """
    content = read_member(archive, FILE, most=MAX_RECORD_BYTES, limits=archive_limits())
    if content is None:
        return None
    try:
        content_json = json.loads(content)
        if isinstance(content_json, dict) and content_json.get("format") != FORMAT:
            message = (
                f"{FILE} is of format {content_json.get('format')}, and this tsx reads format"
                f" {FORMAT}"
            )
            raise CliError(f"{archive}: {message}; measure again: tsx bench {archive} --write")
        return ArchiveRecord.model_validate(content_json)
    except (ValueError, ValidationError, RecursionError) as error:
        raise CliError(
            f"{archive}: {FILE} is damaged; measure again: tsx bench {archive} --write"
        ) from error


def record_of(results: Results, *, only_winner: bool = False) -> ArchiveRecord:
    """Return the record of a run that has a winner.

    It contains the loads of all configurations, or only those of the winner.
    """
    assert results.winner is not None
    best = _best(results, results.winner)
    if best is None:
        raise CliError("the winner has no measured point, so there is nothing to keep")
    return ArchiveRecord(
        measured=results.ended or results.started,
        tsx=results.environment.tsx,
        environment=results.environment,
        model=results.model,
        slo=results.slo,
        protocol=results.protocol,
        inputs=results.inputs,
        best=best,
        curves=results.curves,
        points=_points([results.trials[results.winner]] if only_winner else results.trials),
    )


def _points(trials: Iterable[Trial]) -> list[MeasuredLoad]:
    """Return the loads of configurations whose answers are allowed, without the single rounds."""
    return [
        MeasuredLoad(
            configuration=trial.configuration,
            utilisation=_utilisation(point, trial.as_configuration().workers),
            **point.model_dump(
                exclude={"rounds": True, "stream": {"ttft_histogram", "tpot_histogram"}}
            ),
        )
        for trial in trials
        if trial.accuracy is None or trial.accuracy.allowed
        for point in trial.points
    ]


def _utilisation(point: Point, workers: int) -> float | None:
    busy_ms = [round_.busy_ms for round_ in point.counted if round_.busy_ms is not None]
    if not busy_ms:
        return None
    return round(min(1.0, point.throughput.value * fmean(busy_ms) / 1000 / workers), 4)


def _best(results: Results, winner: int) -> Best | None:
    trial = results.trials[winner]
    point = trial.chosen
    if point is None:
        return None
    return Best(
        configuration=trial.configuration,
        describes=str(trial.as_configuration()),
        offered=point.offered,
        throughput=point.throughput.value,
        p50_ms=point.latency.p50_ms,
        p99_ms=point.p99_ms.value,
    )
