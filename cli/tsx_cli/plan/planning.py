"""The number of replicas for a request rate, calculated from measured loads."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from tsx_archiver import inspect_archive
from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import parse_slo, read_results
from tsx_cli.bench.report.archive_record import ArchiveRecord, MeasuredLoad, read_record, record_of
from tsx_cli.bench.search.points import best_point, cost_per_million, knee_of
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import archive_limits
from tsx_cli.common.output import milliseconds, number, print_table
from tsx_runtime.core.placement.hardware import describe


def read_measurements(archive: Path | None, results: Path | None) -> ArchiveRecord:
    """Return the record of a results.json, or else of an archive.

    Raises:
        CliError: There is no record, or the run has no winner.
        UsageError: Neither is given.
    """
    if results is not None:
        run = read_results(results)
        if run.winner is None:
            raise CliError(f"{results} has no winner to plan from; run `tsx bench` to completion")
        return record_of(run)
    if archive is None:
        raise UsageError(
            "name an archive that `tsx bench MODEL.mar --write` has measured, or the --results of a"
            " benchmark"
        )
    record = read_record(archive)
    if record is None:
        measure = f"`tsx bench {archive} --ramp --write` measures it"
        raise CliError(f"{archive} was never measured. {measure}; or name a --results file")
    return record


def bounds_of(slo: str | None, archive: Path | None, record: ArchiveRecord) -> Slo | None:
    """Return the given bounds, or else the archive's latency target, or the benchmark's bounds."""
    if slo is None and archive is not None:
        slo = inspect_archive(archive, limits=archive_limits()).config.slo
    text = slo or record.slo
    return parse_slo(text) if text else None


def highest_load(
    record: ArchiveRecord,
    bounds: Slo | None,
    workers: int | None,
    batch_size: int | None,
    archive: Path | None,
) -> MeasuredLoad:
    """Return the load with the highest rate that kept the bounds.

    Raises:
        CliError: No load of that configuration was measured, or none kept the bounds.
    """
    best = Configuration(**record.best.configuration)
    workers, batch_size = workers or best.workers, batch_size or best.batch_size
    loads = [
        load
        for load in _evaluate_loads(record, bounds)
        if load.as_configuration.variant.kind == best.variant.kind
        and (load.as_configuration.workers, load.as_configuration.batch_size)
        == (workers, batch_size)
    ]
    loads_by_configuration = [
        [load for load in loads if load.as_configuration == configuration]
        for configuration in dict.fromkeys(load.as_configuration for load in loads)
    ]
    highest = filter(None, map(_highest, loads_by_configuration))
    if (load := max(highest, key=lambda load: load.throughput.value, default=None)) is not None:
        return load
    reason = f"no measured load kept {bounds}" if loads else "the benchmark has no load"
    name = str(archive or record.model.archive or f"{record.model.name}.mar")
    options = ["--workers", str(workers), "--batch-sizes", str(batch_size), "--ramp", "--write"]
    command = ["tsx", "bench", name, *(["--slo", str(bounds)] if bounds else []), *options]
    raise CliError(
        f"{reason} with workers {workers}, batch size {batch_size}; this measures it:"
        f" {shlex.join(command)}"
    )


def _evaluate_loads(record: ArchiveRecord, bounds: Slo | None) -> list[MeasuredLoad]:
    """Return the measured loads; `holds` is evaluated for these bounds."""
    return [
        load.model_copy(update={"holds": _holds(load, bounds, record)}) for load in record.points
    ]


def _holds(load: MeasuredLoad, bounds: Slo | None, record: ArchiveRecord) -> bool:
    measured_bounds = parse_slo(record.slo) if record.slo else Slo(())
    fell_behind = not load.holds and not measured_bounds.broken(load.times, load.error_rate)
    return not fell_behind and not (bounds or Slo(())).broken(load.times, load.error_rate)


def _highest(loads: list[MeasuredLoad]) -> MeasuredLoad | None:
    """Return the best load that is surely within the bounds.

    If an open loop held and a higher one broke the bounds, it is at the highest rate that held. If
    open loops only broke the bounds, it is below the lowest of them. Otherwise it is the best of
    all loads.
    """
    highest_holding, lowest_broken = knee_of(loads)
    if highest_holding is not None and lowest_broken is not None:
        loads = [load for load in loads if load.offered == highest_holding.offered]
    elif lowest_broken is not None:
        limit = lowest_broken.offered.rate or 0.0
        loads = [load for load in loads if load.throughput.value < limit]
    best = best_point(loads)
    return None if best is None else loads[best]


def plan(
    record: ArchiveRecord,
    load: MeasuredLoad,
    rate: float,
    bounds: Slo | None,
    headroom: float,
    price_per_hour: float | None,
) -> dict[str, Any]:
    """Return the report. `rate` is in requests per second, and `headroom` is a fraction of it."""
    highest = load.throughput.value
    replicas = math.ceil(rate * (1 + headroom) / highest)
    knee = knee_of(
        evaluated_load
        for evaluated_load in _evaluate_loads(record, bounds)
        if evaluated_load.as_configuration == load.as_configuration
    )
    environment = record.environment
    report: dict[str, Any] = {
        "rps": round(rate, 3),
        "slo": None if bounds is None else str(bounds),
        "replicas": replicas,
        "configuration": load.configuration,
        "describes": str(load.as_configuration),
        "most_rps_per_replica": round(highest, 1),
        "lower_limit": load.offered.mode == "open" and knee.broken is None,
        "share_of_most": round(rate / replicas / highest, 4),
        "load": {
            "offered": load.offered.model_dump(),
            "describes": str(load.offered),
            **load.latency.model_dump(),
            "error_rate": load.error_rate,
            "utilisation": load.utilisation,
        },
        "measured": {
            "date": record.measured,
            "on": describe(environment.cpu, environment.cores, tuple(environment.gpus)),
            "here": record.here,
        },
    }
    if price_per_hour is not None:
        report["cost_per_hour"] = round(price_per_hour * replicas, 6)
        report["cost_per_million"] = round(cost_per_million(price_per_hour * replicas, rate), 6)
    return report


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    load, measured = report["load"], report["measured"]
    utilisation, capacity = report["share_of_most"], report["most_rps_per_replica"]
    rows: list[tuple[str, object]] = [
        ("replicas", report["replicas"]),
        ("each of them", report["describes"]),
        (
            "the most that one does",
            f"{capacity:,.4g} requests/s, of which this is {utilisation:.0%}",
        ),
        ("measured with", load["describes"]),
        ("latency then", f"p50 {milliseconds(load['p50_ms'])}, p99 {milliseconds(load['p99_ms'])}"),
    ]
    if load["utilisation"] is not None:
        rows.append(("workers at work then", f"{load['utilisation']:.0%} of the time"))
    if "cost_per_hour" in report:
        rows.append(("cost per hour", f"{report['cost_per_hour']:.2f}"))
        rows.append(("cost per million requests", number(report["cost_per_million"])))
    bound = f" under {report['slo']}" if report["slo"] else ""
    print_table([f"{report['rps']:g} requests/s{bound}", ""], rows)
    print(f"Measured {measured['date'][:10]} on {measured['on']}.")
    if not measured["here"]:
        print("This machine is different: the figures are for machines like the measured one.")
    if report["lower_limit"]:
        print("No rate broke the bounds, so one server may do more: measure higher rates with")
        print("tsx bench --ramp --write and a longer --time-limit.")
    if load["offered"]["mode"] == "closed":
        print("Its clients waited for their answers; requests that arrive at random wait longer.")
        print("Use --headroom, or measure such requests: tsx bench --ramp --write.")
