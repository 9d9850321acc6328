"""results.csv: a row for each measured load, and one for each configuration without any."""

from __future__ import annotations

import csv
import io
from dataclasses import fields
from typing import Any

from tsx_cli.bench.model.configuration import Configuration
from tsx_cli.bench.model.parts import Latency
from tsx_cli.bench.model.results import Point, Results, Stages
from tsx_cli.bench.report import shown
from tsx_cli.common.output import csv_cell

CONFIGURATION = tuple(field.name for field in fields(Configuration))
STAGES = tuple(Stages.model_fields)
STREAM = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
STREAM_RATES = ("tokens_per_second", "prompt_tokens_per_second", "goodput")


def rows(results: Results) -> list[dict[str, Any]]:
    """Every row has the same columns; what is not known is empty."""
    found: list[dict[str, Any]] = []
    for number, trial in enumerate(results.trials):
        how = trial.how().as_json() if trial.configuration else {}
        accuracy = None if trial.accuracy is None else trial.accuracy.same
        same = {"trial": number, **{key: how.get(key) for key in CONFIGURATION}, "state": trial.state, "same_answers": accuracy}
        ends = {"note": shown.note(trial, results)}
        for index, point in enumerate(trial.points):
            best = index == trial.best
            stages = trial.stages.model_dump() if best and trial.stages is not None else {}
            cost = {"cost_per_million": shown.per_million(point, results)}
            marks = {"best": best, "winner": best and number == results.winner, "baseline": best and number == results.baseline}
            found.append(same | marks | _figures(point) | cost | {key: stages.get(key) for key in STAGES} | ends)
        if not trial.points:
            marks = dict.fromkeys(("best", "winner", "baseline"), False)
            found.append(same | marks | _figures(None) | dict.fromkeys(("cost_per_million", *STAGES)) | ends)
    return found


def _figures(point: Point | None) -> dict[str, Any]:
    if point is None:
        head = ("mode", "connections", "rate", "arrivals", "throughput", "throughput_low", "throughput_high", *Latency.model_fields)
        head = (*head, *STREAM, *STREAM_RATES)
        return dict.fromkeys(
            (*head, "p99_low_ms", "p99_high_ms", "error_rate", "holds", "rounds", "seconds", "sent", "accepted", "refused")
        )
    return {
        **point.offered.model_dump(),
        "throughput": point.throughput.value,
        "throughput_low": point.throughput.low,
        "throughput_high": point.throughput.high,
        **point.latency.model_dump(),
        **{name: point.times.get(f"{name[:4]}.{name[5:]}") for name in STREAM},
        **{name: getattr(point.stream, name, None) for name in STREAM_RATES},
        "p99_low_ms": point.p99_ms.low,
        "p99_high_ms": point.p99_ms.high,
        "error_rate": point.error_rate,
        "holds": point.holds,
        "rounds": len(point.rounds),
        "seconds": sum(each.seconds for each in point.rounds),
        "sent": sum(each.sent for each in point.rounds),
        "accepted": sum(each.ok for each in point.rounds),
        "refused": sum(each.refused for each in point.rounds),
    }


def csv_text(results: Results) -> str:
    found = rows(results)
    out = io.StringIO()
    if found:
        writer = csv.DictWriter(out, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in found)
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return csv_cell(value)
