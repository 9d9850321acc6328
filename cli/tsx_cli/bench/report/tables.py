"""The tables of a report and the rows of results.csv, made from results.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import Point, Results, SizeClass, Trial
from tsx_cli.bench.load.statistics import interval
from tsx_cli.bench.report import shown
from tsx_cli.bench.report.figures import STAGES, stage_times
from tsx_cli.bench.report.render import NOTE, ReportTable
from tsx_cli.common.output import milliseconds, number

LATENCIES = ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")
STREAM = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
STREAM_RATES = ("tokens_per_second", "prompt_tokens_per_second", "goodput")


def tables(results: Results) -> list[ReportTable]:
    """Return all tables; tables without figures have no rows."""
    trials = [results.trials[index] for index in shown.ordered(results)]
    return [
        configurations(results),
        *details(trials, results),
        _stages(trials, results),
        loads(trials, results),
    ]


def headline(results: Results) -> list[tuple[str, str]]:
    """Return the names and figures of the summary's configuration."""
    trial, point = shown.detailed_trial(results), shown.summary_point(results)
    if trial is None or point is None:
        return []
    best = trial.model_copy(update={"points": [point], "best": 0})
    table = configurations(results.model_copy(update={"trials": [best]}))
    figures = [*zip(table.head[1:-1], table.rows[0][1:-1], strict=True)]
    streams = _streams([best], results)
    figures += [
        pair for row in streams.rows for pair in zip(streams.head[1:], row[1:], strict=True)
    ]
    if (gain := shown.gain(results)) is not None:
        noise_text = ", within the noise" if not gain.real and math.isfinite(gain.high) else ""
        figures.append(("compared with the baseline", f"{gain.ratio:.2f} times{noise_text}"))
    return figures


def details(trials: Sequence[Trial], results: Results) -> list[ReportTable]:
    """Return tables of details: for the best configuration in the terminal, for all in reports."""
    return [_streams(trials, results), _sizes(results), _starts(trials, results)]


def configurations(results: Results) -> ReportTable:
    """Return a table with a row for each configuration, the best first."""
    head = (
        "configuration",
        "load",
        "answers/s",
        "p50",
        "p99",
        "errors",
        *_cost_column(results),
        NOTE,
    )
    rows = [_configuration(index, results) for index in shown.ordered(results)]
    return ReportTable("All configurations", "", head, rows, 2)


def _configuration(index: int, results: Results) -> list[str]:
    trial = results.trials[index]
    point, mark = shown.shown_point(trial), shown.mark(index, results)
    name = shown.name(trial, results) + (f" ({mark})" if mark else "")
    if point is not None:
        return [
            name,
            point.offered.short,
            *_figures(point, ("p50_ms", "p99_ms"), results),
            shown.note(trial, results),
        ]
    predicted = trial.predicted if trial.state == "predicted" else None
    p99 = math.inf if predicted is None else predicted.p99_ms
    rate = shown.NONE if predicted is None else f"~{number(predicted.throughput)}"
    figures = [
        rate,
        shown.NONE,
        shown.NONE if math.isinf(p99) else f"~{milliseconds(p99)}",
        shown.NONE,
    ]
    return [
        name,
        shown.NONE,
        *figures,
        *(shown.NONE for _ in _cost_column(results)),
        shown.note(trial, results),
    ]


def _figures(point: Point, latencies: Sequence[str], results: Results) -> list[str]:
    times = {**point.latency.model_dump(), "p99_ms": point.p99_ms.value}
    cost = [shown.cost(point, results)] if _cost_column(results) else []
    rate = f"{number(point.throughput.value)} {shown.margin(point.throughput)}".strip()
    return [
        rate,
        *(milliseconds(times[name]) for name in latencies),
        shown.share(point.error_rate),
        *cost,
    ]


def _cost_column(results: Results) -> tuple[str, ...]:
    return () if results.price_per_hour is None else ("cost/M",)


def loads(trials: Sequence[Trial], results: Results) -> ReportTable:
    head = (
        "configuration",
        "load",
        "answers/s",
        *map(shown.figure_label, LATENCIES),
        "errors",
        *_cost_column(results),
        "rounds",
        "bounds",
    )
    rows = [
        [
            shown.name(trial, results),
            str(point.offered),
            *_figures(point, LATENCIES, results),
            _rounds(point),
            "hold" if point.holds else "broken",
        ]
        for trial in trials
        for point in trial.points
    ]
    return ReportTable("All measured loads", "", head, rows, 2, is_folded=True)


def _rounds(point: Point) -> str:
    disturbed = sum(bool(round_.disturbed) for round_ in point.counted)
    return (
        f"{len(point.counted)} ({disturbed} disturbed)"
        if disturbed
        else str(len(point.counted) or shown.NONE)
    )


def _streams(trials: Sequence[Trial], results: Results) -> ReportTable:
    says = (
        "TTFT is the time to the first token, TPOT the time per output token after it; tokens are"
        " those that were generated. Goodput is the answers per second of which each kept the"
        " bounds of time by itself."
    )
    head = (
        "configuration, load",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "tokens/s",
        "prompt tokens/s",
        "goodput",
    )
    rows = [
        [
            f"{shown.name(trial, results)}, {point.offered.short}",
            *(
                milliseconds(point.times[name])
                for name in ("ttft.p50_ms", "ttft.p99_ms", "tpot.p50_ms", "tpot.p99_ms")
            ),
            number(stream.tokens_per_second),
            number(stream.prompt_tokens_per_second) if stream.prompt_tokens else shown.NONE,
            shown.NONE if stream.goodput is None else f"{number(stream.goodput)}/s",
        ]
        for trial in trials
        for point in trial.points
        if (stream := point.stream) is not None
    ]
    return ReportTable("Streams of tokens", says, head, rows)


def _sizes(results: Results) -> ReportTable:
    """Return the latencies by the size of the input, at the load of the summary."""
    point = shown.summary_point(results)
    classes: dict[tuple[int, int], list[SizeClass]] = {}
    for size_class in (
        size_class
        for round_ in (point.counted if point else [])
        for size_class in round_.by_size
        if size_class.ok
    ):
        classes.setdefault((size_class.smallest, size_class.largest), []).append(size_class)
    rows = [
        [
            f"{smallest:,} bytes" if smallest == largest else f"{smallest:,} to {largest:,} bytes",
            f"{sum(size_class.ok for size_class in size_classes):,}",
            shown.with_margin(interval([size_class.p50_ms for size_class in size_classes])),
            shown.with_margin(interval([size_class.p99_ms for size_class in size_classes])),
        ]
        for (smallest, largest), size_classes in sorted(classes.items())
    ]
    return ReportTable("By size of the input", "", ("input", "answers", "p50", "p99"), rows)


def _starts(trials: Sequence[Trial], results: Results) -> ReportTable:
    says = (
        "A server's start until it is ready, its first answer after that, and its median latency"
        " once warm, at its lightest load."
    )
    rows = []
    for trial in trials:
        warm_latencies = [
            point.latency.p50_ms for point in trial.points if point.latency.p50_ms > 0
        ]
        if trial.starts and warm_latencies:
            first_answers = [
                start.first_answer_ms for start in trial.starts if start.first_answer_ms is not None
            ]
            ready_text = shown.with_margin(
                interval([1000 * start.ready_seconds for start in trial.starts])
            )
            first_answer_text = (
                shown.with_margin(interval(first_answers)) if first_answers else shown.NONE
            )
            rows.append(
                [
                    shown.name(trial, results),
                    ready_text,
                    first_answer_text,
                    milliseconds(min(warm_latencies)),
                ]
            )
    return ReportTable(
        "Cold and warm",
        says,
        ("configuration", "start until ready", "first answer", "warm p50"),
        rows,
    )


def _stages(trials: Sequence[Trial], results: Results) -> ReportTable:
    rows = [
        [
            shown.name(trial, results),
            *(milliseconds(value) for _, value in stage_times(trial.stages)),
        ]
        for trial in trials
        if trial.stages is not None
    ]
    return ReportTable(
        "Mean time of a request", "", ("configuration", *STAGES), rows, is_folded=True
    )


def csv_rows(results: Results) -> Iterator[dict[str, Any]]:
    """Yield a row for each measured load, and one for each configuration without measured loads."""
    for index, trial in enumerate(results.trials):
        configuration = (
            trial.as_configuration().as_json()
            if trial.configuration
            else {field.name: None for field in fields(Configuration)}
        )
        same_answers = None if trial.accuracy is None else trial.accuracy.same
        trial_row = {
            "trial": index,
            **configuration,
            "state": trial.state,
            "same_answers": same_answers,
        }
        for point_index, point in enumerate(trial.points):
            is_best = point_index == trial.best
            yield {
                **trial_row,
                "best": is_best,
                "winner": is_best and index == results.winner,
                "baseline": is_best and index == results.baseline,
                **_csv_figures(point),
                "cost_per_million": shown.per_million(point, results),
                **(trial.stages.model_dump() if is_best and trial.stages is not None else {}),
                "note": shown.note(trial, results),
            }
        if not trial.points:
            yield {
                **trial_row,
                "best": False,
                "winner": False,
                "baseline": False,
                "note": shown.note(trial, results),
            }


def _csv_figures(point: Point) -> dict[str, Any]:
    return {
        **point.offered.model_dump(),
        "throughput": point.throughput.value,
        "throughput_low": point.throughput.low,
        "throughput_high": point.throughput.high,
        **point.latency.model_dump(),
        **{name: point.times.get(name.replace("_", ".", 1)) for name in STREAM},
        **{name: getattr(point.stream, name, None) for name in STREAM_RATES},
        "p99_low_ms": point.p99_ms.low,
        "p99_high_ms": point.p99_ms.high,
        "error_rate": point.error_rate,
        "holds": point.holds,
        "rounds": len(point.rounds),
        "seconds": sum(round_.seconds for round_ in point.rounds),
        "sent": sum(round_.sent for round_ in point.rounds),
        "accepted": sum(round_.ok for round_ in point.rounds),
        "refused": sum(round_.refused for round_ in point.rounds),
    }
