"""`tsx plan`: the replicas that a request rate needs, and their cost, without a server."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsx_archiver import ModelConfig, inspect_archive
from tsx_archiver.metadata.slo import Slo, latency_target
from tsx_archiver.quantities import parse_share
from tsx_cli.bench.capacity.planning import CapacityPlan
from tsx_cli.bench.model.configuration import AS_IS, Configuration
from tsx_cli.bench.model.points import cost_per_million
from tsx_cli.bench.model.predict import timing_of
from tsx_cli.bench.model.replica import Replica, fitted
from tsx_cli.bench.model.results import read_results
from tsx_cli.bench.search.run_options import finite
from tsx_cli.bench.storage.archive_record import ArchiveRecord, read_record, record_of
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import archive_limits
from tsx_cli.common.output import milliseconds, number, print_table
from tsx_runtime.core.placement.hardware import describe
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.recordings import NotARecording, read

QUEUE = 100  # requests that may wait where the model says nothing
STEEP = 1.3  # times the p99 that the slowest round would have had more than the quickest: the prediction is then unreliable
CROWDED = 0.85  # of what a replica can do: beyond it queues grow and shrink by chance for minutes


def measured_in(archive: Path | None, results: Path | None) -> ArchiveRecord:
    """Raises CliError, UsageError."""
    if results is not None:
        found = read_results(results)
        if found.winner is None or found.trials[found.winner].chosen is None or not found.curves:
            raise CliError(f"{results} has no winner with a latency curve to plan from; run `tsx bench` on an archive to completion")
        return record_of(found)
    if archive is None:
        raise UsageError("name an archive that `tsx bench MODEL.mar --write` has measured, or the --results of a benchmark")
    kept = read_record(archive)
    if kept is None:
        raise CliError(f"{archive} was never measured. `tsx bench {archive} --write` measures it; or name a --results file")
    if not kept.curves:
        only = "was measured in one configuration, which gives no times by batch size"
        command = measuring_command(archive, Configuration(**kept.best.configuration))
        raise CliError(f"{archive} {only}; this does: {command}")
    return kept


def measuring_command(archive: Path, won: Configuration) -> str:
    """Return a line for a shell that times batches of workers like the winner's."""
    options = {
        "devices": won.device,
        "precision": None if won.precision == AS_IS else won.precision,
        "compile": None if won.compiled is None else ("off", "on")[won.compiled],
        "forms": won.form,
        "threads": won.threads,
        "workers": won.workers,
        "batch-sizes": f"1..{max(2, won.batch_size)}",
    }
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return shlex.join(["tsx", "bench", str(archive), *words, "--write"])


def moments_of(recording: Path | None) -> list[float]:
    """In order; none without a recording. Raises CliError."""
    if recording is None:
        return []
    try:
        moments = sorted(entry.at for entry in read(recording))
    except NotARecording as error:
        raise CliError(str(error)) from error
    if len(moments) < 2 or moments[-1] <= moments[0]:
        raise CliError(f"{recording} has too few requests to derive their arrivals; at least two, at different times, are needed")
    return moments


def rate_of(rps: float | None, moments: list[float]) -> float:
    if rps is not None:
        return finite(rps, "--rps")
    if not moments:
        raise UsageError("give the request rate: --rps 300, or --recording FILE")
    return (len(moments) - 1) / (moments[-1] - moments[0])


def share_of(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (share := parse_share(text)) <= 100:
            return share
    raise UsageError(f"--headroom: '{text}' is not a share; write 20% or 0.2")


def replica_of(measured: ArchiveRecord, archive: Path | None, workers: int | None, batch_size: int | None) -> Replica:
    """Raises CliError."""
    config = ModelConfig() if archive is None else inspect_archive(archive, limits=archive_limits()).config
    won = Configuration(**measured.best.configuration)
    cores = measured.environment.cores
    like = [curve for curve in measured.curves if curve.variant.kind == won.variant.kind]
    # The winner's own curve, else that of the nearest number of threads: a short run times few.
    threads = won.threads_each(cores)
    like.sort(key=lambda curve: (curve.variant != won.variant, abs((curve.threads or cores) - threads)))
    timing = next(filter(None, map(timing_of, like)), None)
    if timing is None:
        command = measuring_command(archive or Path(f"{measured.model.name}.mar"), won)
        raise CliError(f"the benchmark kept no curve of {won}; this measures one: {command}")
    if config.batch_policy not in (None, "wait"):
        raise CliError(f"batchPolicy: {config.batch_policy} is a plugin, whose decisions cannot be simulated; leave it out to plan without")
    wait = (100 if config.max_batch_delay is None else config.max_batch_delay) / 1000 if config.batch_policy == "wait" else None
    limits = BatchLimits(max_items=won.batch_size, wait=wait)
    replica = Replica(timing, won, measured.environment.cores, limits, config.job_queue_size or QUEUE)
    replica = fitted(replica, measured.loads or [measured.as_best()], measured.alone_ms, measured.transport_ms)
    replica = replica.of(replace(won, workers=workers or won.workers, batch_size=batch_size or won.batch_size))
    return replica if config.slo is None or batch_size else replica.under(latency_target(config.slo))


def as_json(
    measured: ArchiveRecord, replica: Replica, planned: CapacityPlan, rate: float, bounds: Slo | None, price: float | None
) -> dict[str, Any]:
    at, low, high = planned.at, planned.quickest, planned.slowest
    batches = sum(at.batch_sizes.values()) or 1
    where = measured.environment
    quickest, slowest = replica.quickest_and_slowest
    report: dict[str, Any] = {
        "rps": round(rate, 3),
        "slo": None if bounds is None else str(bounds),
        "replicas": planned.replicas,
        "replicas_at_slowest": planned.replicas_at_slowest,
        "configuration": replica.configuration.as_json(),
        "describes": str(replica),
        "share_of_most": round(rate / planned.replicas / planned.highest, 4),
        "utilisation": round(at.utilisation, 4),
        "p50_ms": round(at.p50_ms, 3),
        "p50_range_ms": [round(low.p50_ms, 3), round(high.p50_ms, 3)],
        "p90_ms": round(at.p90_ms, 3),
        "p99_ms": round(at.p99_ms, 3),
        "p99_range_ms": [round(low.p99_ms, 3), round(high.p99_ms, 3)],
        "p99_with_headroom_ms": round(planned.with_headroom.p99_ms, 3),
        "mean_batch_size": round(at.answered / batches, 2),
        "cores_left": round(_cores_left(replica), 2),
        "refused": round(at.refused / ((at.refused + at.answered) or 1), 6),
        "most_rps_per_replica": round(planned.highest, 1),
        "measured": {
            "date": measured.measured,
            "on": describe(where.cpu, where.cores, tuple(where.gpus)),
            "here": measured.here,
            "server_over_curve": round(replica.scale, 3),
            "batches_from": round(quickest.scale / replica.scale, 3),  # times as long as in the mean, in a quick round
            "batches_to": round(slowest.scale / replica.scale, 3),  # in a slow one
        },
    }
    if price is not None:
        report["cost_per_hour"] = round(price * planned.replicas, 6)
        report["cost_per_million"] = round(cost_per_million(price * planned.replicas, rate), 6)
    return report


def _cores_left(replica: Replica) -> float:
    """By workers that are all at work."""
    how, busy = replica.configuration, replica.timing.busy
    taken = how.workers * (busy if busy is not None else float(how.threads or 1)) if how.device == "cpu" else 0.0
    return max(0.0, replica.cores - taken)


def show(report: dict[str, Any], planned: CapacityPlan) -> None:
    rows: list[tuple[str, object]] = [
        ("replicas", report["replicas"]),
        ("each of them", report["describes"]),
        ("the most that one does", f"{report['most_rps_per_replica']:,.0f} requests/s, of which this is {report['share_of_most']:.0%}"),
        ("workers at work", f"{report['utilisation']:.0%} of the time, on {report['mean_batch_size']:.1f} requests each time"),
        ("latency p50", _with_range(report, "p50")),
        ("latency p99", _with_range(report, "p99")),
    ]
    if planned.with_headroom is not planned.at and report["p99_with_headroom_ms"] != report["p99_ms"]:
        rows.append(("p99 with the headroom used up", milliseconds(report["p99_with_headroom_ms"])))
    if report["refused"]:
        rows.append(("refused", f"{report['refused']:.2%}"))
    if "cost_per_hour" in report:
        rows += [("cost per hour", f"{report['cost_per_hour']:.2f}"), ("cost per million requests", number(report["cost_per_million"]))]
    bound = f" under {report['slo']}" if report["slo"] else ""
    print_table([f"{report['rps']:g} requests/s{bound}", ""], rows)
    measured = report["measured"]
    elsewhere = "" if measured["here"] else " This machine is different: the figures are for machines like the measured one."
    print(f"From a curve that was measured {measured['date'][:10]} on {measured['on']}.{elsewhere}")
    for warning in _warnings(report):
        print(warning)


def _with_range(report: dict[str, Any], which: str) -> str:
    low, high = report[f"{which}_range_ms"]
    return f"{milliseconds(report[f'{which}_ms'])} ({milliseconds(low)} to {milliseconds(high)})"


def _warnings(report: dict[str, Any]) -> list[str]:
    """What a reader of the figures must know, in sentences."""
    measured, (low, high) = report["measured"], report["p99_range_ms"]
    least, most = measured["batches_from"], measured["batches_to"]
    found = [f"The ranges: batches may take {least:.2f} to {most:.2f} times as long, as in single rounds of the benchmark."]
    more = report["replicas_at_slowest"]
    if more is None:
        found.append("If all batches take as long as the longest, no number of replicas keeps the bounds.")
    elif more > report["replicas"]:
        found.append(f"If all batches take as long as the longest, it takes {more} replicas.")
    if report["cores_left"] < 1:
        found.append("Its workers leave no core for the server itself, so p99 may be longer than this.")
    if report["share_of_most"] > CROWDED:
        found.append("This close to the limit, p99 depends on small changes and on chance: use more --headroom.")
    elif high > STEEP * low:
        found.append("The range is wide, because the machine was not steady or a burst causes queueing: use more --headroom.")
    return found
