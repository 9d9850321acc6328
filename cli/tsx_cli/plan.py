"""`tsx plan`: how many replicas a rate of requests takes, and what they cost, without a server."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tsx_archiver import ModelConfig, inspect_archive
from tsx_cli.bench.configuration import Configuration
from tsx_cli.bench.kept import alone_of, read_kept
from tsx_cli.bench.planning import Planned, Replica, Seen, fitted, plan
from tsx_cli.bench.predict import timing_of
from tsx_cli.bench.results import Curve, Environment, Point, read_results
from tsx_cli.bench.slo import Slo, parse_slo
from tsx_cli.failure import CliError, UsageError
from tsx_cli.output import print_json, print_table
from tsx_runtime.core.hardware import describe, hardware
from tsx_runtime.core.queue import Limits
from tsx_runtime.recordings import NotARecording, read

QUEUE = 100  # requests that may wait where the model says nothing


class Measured(NamedTuple):
    """What a benchmark left: of its winner, and of the machine."""

    curves: list[Curve]
    environment: Environment
    configuration: Configuration
    best: Seen
    alone: Seen | None  # one request at a time, on one worker
    transport_ms: float | None
    date: str
    slo: str | None


def tell_plan(
    archive: Path | None,
    *,
    rps: float | None,
    slo: str | None,
    workers: int | None,
    batch_size: int | None,
    recording: Path | None,
    price_per_hour: float | None,
    headroom: str,
    results: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """What the options ask for, on a terminal or as JSON. Raises CliError, UsageError."""
    measured = _measured(archive, results)
    moments = _moments(recording)
    rate = _rate(rps, moments)
    bounds = _bounds(slo or measured.slo)
    replica = _replica(measured, _config(archive), workers, batch_size)
    planned = plan(replica, rate, bounds, headroom=_share(headroom), moments=moments, seed=seed)
    if planned is None:
        alone = f"one request at a time takes {replica.times[0]:.3g} ms already"
        raise CliError(f"no number of replicas keeps {bounds}: {alone}; find a quicker way to run the model with tsx bench")
    told = _told(measured, replica, planned, rate, bounds, None if price_per_hour is None else _known(price_per_hour, "--price-per-hour"))
    if as_json:
        print_json(told)
    else:
        _show(told, planned)


def _measured(archive: Path | None, results: Path | None) -> Measured:
    if results is not None:
        return _from_results(results)
    if archive is None:
        raise UsageError("name an archive that `tsx bench MODEL.mar --write` has measured, or the --results of a benchmark")
    kept = read_kept(archive)
    if kept is None or not kept.curves:
        raise CliError(f"{archive} was never measured. `tsx bench {archive} --write` measures it; or name a --results file")
    best = kept.best
    how, seen = Configuration(**best.configuration), Seen(best.offered, best.throughput, best.p50_ms, best.p99_ms)
    alone = None if kept.alone is None else _seen(kept.alone)
    return Measured(kept.curves, kept.environment, how, seen, alone, kept.transport_ms, kept.measured, kept.slo)


def _from_results(path: Path) -> Measured:
    found = read_results(path)
    trial = None if found.winner is None else found.trials[found.winner]
    point = None if trial is None else trial.chosen
    if trial is None or point is None or not found.curves:
        raise CliError(f"{path} has no winner with a curve to plan from; run `tsx bench` on an archive until it ends")
    alone, transport = alone_of(found)
    seen, date = _seen(point), found.ended or found.started
    return Measured(found.curves, found.environment, trial.how(), seen, None if alone is None else _seen(alone), transport, date, found.slo)


def _seen(point: Point) -> Seen:
    return Seen(point.offered, point.throughput.value, point.latency.p50_ms, point.latency.p99_ms)


def _config(archive: Path | None) -> ModelConfig:
    return ModelConfig() if archive is None else inspect_archive(archive).config


def _moments(recording: Path | None) -> list[float]:
    if recording is None:
        return []
    try:
        moments = sorted(entry.at for entry in read(recording))
    except NotARecording as error:
        raise CliError(str(error)) from error
    if len(moments) < 2 or moments[-1] <= moments[0]:
        raise CliError(f"{recording} has too few requests to tell how they come; two at least, at different times, are needed")
    return moments


def _rate(rps: float | None, moments: list[float]) -> float:
    if rps is not None:
        return _known(rps, "--rps")
    if not moments:
        raise UsageError("say how many requests come: --rps 300, or --recording FILE")
    return (len(moments) - 1) / (moments[-1] - moments[0])


def _known(value: float, option: str) -> float:
    """nan is within any range. Raises UsageError."""
    if not math.isfinite(value):
        raise UsageError(f"{option}: {value} is no number; write one such as 50")
    return value


def _bounds(text: str | None) -> Slo | None:
    return parse_slo(text) if text else None


def _share(text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 100:
        raise UsageError(f"--headroom: '{text}' is no share; write 20% or 0.2")
    return share


def _replica(measured: Measured, config: ModelConfig, workers: int | None, batch_size: int | None) -> Replica:
    won = measured.configuration
    found = next((curve for curve in measured.curves if curve.variant == won.variant), None)
    timing = None if found is None else timing_of(found)
    if timing is None:
        raise CliError(f"the benchmark kept no curve of {won}; measure again")
    wait = (100 if config.max_batch_delay is None else config.max_batch_delay) / 1000 if config.batch_policy == "wait" else None

    limits = Limits(max_items=won.batch_size, wait=wait)
    replica = Replica(timing, won, measured.environment.cores, limits, config.job_queue_size or QUEUE)
    replica = fitted(replica, measured.best, measured.alone, measured.transport_ms)
    asked = replace(won, workers=workers or won.workers, batch_size=batch_size or won.batch_size)
    return replica._replace(configuration=asked, limits=limits._replace(max_items=asked.batch_size))


def _told(measured: Measured, replica: Replica, planned: Planned, rate: float, bounds: Slo | None, price: float | None) -> dict[str, Any]:
    at = planned.at
    batches = sum(at.batch_sizes.values()) or 1
    where = measured.environment
    machine = describe(where.cpu, where.cores, tuple(where.gpus))
    here = hardware().fingerprint == where.fingerprint
    told: dict[str, Any] = {
        "rps": round(rate, 3),
        "slo": None if bounds is None else str(bounds),
        "replicas": planned.replicas,
        "configuration": replica.configuration.as_json(),
        "describes": str(replica.configuration),
        "utilisation": round(at.utilisation, 4),
        "p50_ms": round(at.p50_ms, 3),
        "p90_ms": round(at.p90_ms, 3),
        "p99_ms": round(at.p99_ms, 3),
        "p99_with_headroom_ms": round(planned.with_headroom.p99_ms, 3),
        "mean_batch_size": round(at.answered / batches, 2),
        "refused": round(at.refused / ((at.refused + at.answered) or 1), 6),
        "most_rps_per_replica": round(replica.capacity, 1),
        "measured": {
            "date": measured.date,
            "on": machine,
            "here": here,
            "server_over_curve": round(replica.scale, 3),
        },
    }
    if price is not None:
        told["cost_per_hour"] = round(price * planned.replicas, 6)
        told["cost_per_million"] = round(price * planned.replicas / (rate * 3600) * 1e6, 6)
    return told


def _show(told: dict[str, Any], planned: Planned) -> None:
    rows: list[tuple[str, object]] = [
        ("replicas", told["replicas"]),
        ("each of them", told["describes"]),
        ("utilisation", f"{told['utilisation']:.0%}"),
        ("latency p50", f"{told['p50_ms']:.1f} ms"),
        ("latency p99", f"{told['p99_ms']:.1f} ms"),
        ("mean batch", f"{told['mean_batch_size']:.1f}"),
        ("the most that one does", f"{told['most_rps_per_replica']:.0f} requests/s"),
    ]
    if planned.with_headroom is not planned.at and told["p99_with_headroom_ms"] != told["p99_ms"]:
        rows.append(("p99 with the headroom used up", f"{told['p99_with_headroom_ms']:.1f} ms"))
    if told["refused"]:
        rows.append(("refused", f"{told['refused']:.2%}"))
    if "cost_per_hour" in told:
        rows += [("cost per hour", f"{told['cost_per_hour']:.2f}"), ("cost per million requests", f"{told['cost_per_million']:.4g}")]
    bound = f" under {told['slo']}" if told["slo"] else ""
    print_table([f"{told['rps']:g} requests/s{bound}", ""], rows)
    measured = told["measured"]
    elsewhere = "" if measured["here"] else " This machine is another: the figures are for machines like that one."
    print(f"From a curve that was measured {measured['date'][:10]} on {measured['on']}.{elsewhere}")
