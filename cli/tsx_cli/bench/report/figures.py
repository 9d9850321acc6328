"""The charts of the report, from the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from tsx_cli.bench.model.configuration import Configuration
from tsx_cli.bench.model.results import Curve, Point, Results, Stages, Trial, Usage
from tsx_cli.bench.model.statistics import QUANTILES, merged, percentile
from tsx_cli.bench.report import shown
from tsx_cli.bench.report.charts import Axis, BarSegment, ChartMark, ReferenceLine, Series, axis, bars, plot, stacked

NAMED = 5  # configurations that have a colour of their own; the others are drawn without
MOST_BARS = 8
OTHERS = 2  # beside the winner and the baseline, where lines would hide each other
WIDE = 5.0  # times: latencies that differ by more are drawn on a logarithmic axis
STAGES = tuple(name.removesuffix("_ms") for name in Stages.model_fields)
PERCENTILES = [(0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"), (0.9999, "99.99 %")]


class LegendEntry(NamedTuple):
    """An entry of a legend."""

    style: str
    name: str


class Chart(NamedTuple):
    title: str
    says: str
    svg: str
    legend: Sequence[LegendEntry] = ()


def charts(results: Results) -> list[Chart]:
    """Those that there are figures for."""
    makers: list[Callable[[Results], Chart | None]] = [
        *(frontier, distribution, stages, batch_sizes),
        partial(_over_time, "CPU", "cores", lambda usage: usage.cpu, "Cores that the server's processes used"),
        partial(_over_time, "Memory", "MiB", lambda usage: usage.memory_mib, "Memory of the server's processes"),
        curves,
        partial(_over_time, "GPU", "%", _gpu_share, "Share of the time in which the GPU ran"),
    ]
    return [chart for make in makers if (chart := make(results)) is not None]


def named(results: Results, has: Callable[[Trial], bool]) -> list[tuple[int, str]]:
    """The trials that have a colour, and which: the winner, the baseline, and the best of the others."""
    chosen = []
    colours = iter(f"s{number}" for number in range(2, 2 + NAMED))
    for index in shown.ordered(results):
        if not has(results.trials[index]):
            continue
        if index == results.winner:
            chosen.append((index, "winner"))
        elif index == results.baseline:
            chosen.append((index, "baseline"))
        elif (colour := next(colours, None)) is not None:
            chosen.append((index, colour))
    return chosen


def frontier(results: Results) -> Chart | None:
    """Throughput and latency of each load of each configuration."""
    colours = dict(named(results, lambda trial: bool(trial.points)))
    if not colours:
        return None
    bounds = shown.bounds(results)
    figure = bounds[0].figure if bounds else "p99_ms"
    lines, heights, widths = [], [bound.limit for bound in bounds if bound.figure == figure], []
    for index, trial in enumerate(results.trials):
        points = sorted(trial.points, key=lambda point: (point.offered.mode, point.offered.rate or 0.0, point.offered.connections))
        for _, loop in groupby(points, key=lambda point: point.offered.mode):
            marks = [_mark(point, figure, shown.name(trial, results)) for point in loop]
            heights += [mark.y for mark in marks]
            widths += [mark.x for mark in marks]
            lines.append(Series(shown.name(trial, results), colours.get(index, "other"), marks))
    lines.sort(key=lambda each: ["other", *(f"s{number}" for number in range(9, 1, -1)), "baseline", "winner"].index(each.style))
    legend = [LegendEntry(style, shown.name(results.trials[index], results)) for index, style in colours.items()]
    if any(each.style == "other" for each in lines):
        legend.append(LegendEntry("other", "other configurations"))
    rules = [ReferenceLine(bound.limit, bound.text) for bound in bounds if bound.figure == figure]
    there = [value for value in heights if value > 0]
    x = axis("accepted answers per second", widths, log=False)
    y = axis(f"{shown.word(figure)}, ms", heights, log=bool(there) and max(there) > WIDE * min(there))
    return Chart(
        "Throughput and latency",
        "Each point is a measured load; a line joins the closed loops or the open loops of one configuration. "
        "Points further right and lower are better. Hollow points exceed a bound.",
        plot("Throughput and latency of each configuration", x, y, lines, rules),
        legend,
    )


def _mark(point: Point, figure: str, name: str) -> ChartMark:
    value = float(getattr(point.latency, figure))
    what = f"{shown.number(point.throughput.value)}/s {shown.margin(point.throughput)}".strip()
    hint = f"{name}\n{point.offered}: {what}, {shown.word(figure)} {shown.milliseconds(value)}"
    if point.error_rate:
        hint += f", {shown.share(point.error_rate)} errors"
    return ChartMark(point.throughput.value, value, hint, hollow=not point.holds)


def distribution(results: Results) -> Chart | None:
    """Percentiles of the best points, the winner's and the baseline's above all."""
    lines, heights = [], []
    shown_trials = named(results, lambda trial: shown.shown_point(trial) is not None)
    first = [each for each in shown_trials if each[1] in ("winner", "baseline")]
    for index, style in reversed(first + [each for each in shown_trials if each not in first][:OTHERS]):
        trial = results.trials[index]
        point = shown.shown_point(trial)
        assert point is not None
        name = shown.name(trial, results)
        marks = [
            ChartMark(-math.log10(1 - level), value, f"{name}\n{level:.5g} of the answers within {shown.milliseconds(value)}")
            for level, value in _levels(point)
        ]
        if marks:
            heights += [mark.y for mark in marks]
            lines.append(Series(f"{name}, {point.offered}", style, marks, dots=len(marks) <= len(QUANTILES)))
    if not lines:
        return None
    last = max(mark.x for each in lines for mark in each.marks)
    places = [(0.0, "0"), *((-math.log10(1 - level), text) for level, text in PERCENTILES)]
    x = Axis("share of the answers", 0.0, max(2.0, last), ticks=[tick for tick in places if tick[0] <= max(2.0, last) + 1e-9])
    return Chart(
        "Latency distribution",
        "The latency that a share of the answers does not exceed, for each configuration at its best load.",
        plot("Latency by percentile", x, axis("ms", heights), lines),
        [LegendEntry(each.style, each.name) for each in reversed(lines)],
    )


def _levels(point: Point) -> list[tuple[float, float]]:
    """(share, milliseconds), as far as there are answers to tell."""
    together = merged([each.histogram for each in point.counted])
    answers = sum(count for _, count in together)
    if not answers:
        return [(level, value) for name, level in QUANTILES.items() if (value := float(getattr(point.latency, name))) > 0]
    end = min(5.0, max(1.0, math.log10(answers)))
    steps = [end * step / 60 for step in range(61)]
    return [(1 - 10**-step, percentile(together, 1 - 10**-step)) for step in steps]


def stages(results: Results) -> Chart | None:
    """Where the mean time of a request went."""
    rows = []
    for index, _ in named(results, lambda trial: trial.stages is not None)[:MOST_BARS]:
        trial = results.trials[index]
        assert trial.stages is not None
        times = stage_times(trial.stages)
        parts = [BarSegment(value, f"c{number}", f"{stage}: {shown.milliseconds(value)}") for number, (stage, value) in enumerate(times)]
        rows.append((_titled(index, results), shown.milliseconds(sum(value for _, value in times)), parts))
    if not rows:
        return None
    legend = [LegendEntry(f"c{number}", stage) for number, stage in enumerate(STAGES)]
    return Chart(
        "Where the time goes",
        "The mean time from sending a request to receiving its answer, at the best load of a configuration.",
        stacked("Mean time of a request by stage", rows),
        legend,
    )


def stage_times(stages: Stages) -> list[tuple[str, float]]:
    return [(stage, max(0.0, float(getattr(stages, f"{stage}_ms")))) for stage in STAGES]


def _titled(index: int, results: Results) -> str:
    mark = " (winner)" if index == results.winner else " (baseline)" if index == results.baseline else ""
    return shown.name(results.trials[index], results) + mark


def told_trial(results: Results) -> Trial | None:
    """The one whose details are shown: the winner, or what is best where nothing won."""
    if results.winner is not None:
        return results.trials[results.winner]
    return next((results.trials[index] for index in shown.ordered(results) if results.trials[index].points), None)


def batch_sizes(results: Results) -> Chart | None:
    trial = told_trial(results)
    if trial is None or not trial.batch_sizes:
        return None
    total = sum(trial.batch_sizes.values())
    mean = sum(size * count for size, count in trial.batch_sizes.items()) / total
    values = [
        (str(size), 100 * count / total, f"{count:,} batches of {size} ({count / total:.1%})")
        for size, count in sorted(trial.batch_sizes.items())
    ]
    return Chart(
        "Batches",
        f"Number of requests in a batch, at the best load of {shown.name(trial, results)}: {mean:.1f} on average.",
        bars("Batches by size", "requests in a batch", values, unit="% of the batches"),
    )


def curves(results: Results) -> Chart | None:
    """What one worker alone does of batches of each size."""
    drawn = [curve for curve in results.curves if len(curve.points) > 1]
    if not drawn:
        return None
    lines = []
    for number, curve in enumerate(drawn[:NAMED]):
        marks = [
            ChartMark(
                point.batch_size,
                1000 * point.batch_size / point.median_ms,
                f"{_worker(curve)}\nbatch {point.batch_size}: {shown.milliseconds(point.median_ms)} "
                f"({shown.number(point.low_ms)} to {shown.number(point.high_ms)})",
            )
            for point in curve.points
            if point.median_ms > 0
        ]
        lines.append(Series(_worker(curve), "winner" if number == 0 else f"s{number + 1}", marks))
    sizes = sorted({int(mark.x) for each in lines for mark in each.marks})
    x = Axis("requests in a batch", min(sizes) / 1.15, max(sizes) * 1.15, log=True, ticks=[(size, str(size)) for size in sizes])
    return Chart(
        "One worker without a server",
        "Requests per second of a worker that runs batches of one size back to back, measured in its process.",
        plot(
            "Throughput of one worker by batch size", x, axis("requests/s", [m.y for each in lines for m in each.marks], log=False), lines
        ),
        [LegendEntry(each.style, each.name) for each in lines] if len(lines) > 1 else (),
    )


def _worker(curve: Curve) -> str:
    return Configuration(*curve.variant).worker


def _gpu_share(usage: Usage) -> float | None:
    return None if usage.gpu is None else 100 * usage.gpu


def _over_time(title: str, unit: str, value: Callable[[Usage], float | None], says: str, results: Results) -> Chart | None:
    trial = told_trial(results)
    if trial is None:
        return None
    marks = [
        ChartMark(usage.at_seconds, level, f"{usage.at_seconds:.1f} s: {shown.number(level)} {unit}")
        for usage in trial.usage
        if (level := value(usage)) is not None
    ]
    if len(marks) < 2:
        return None
    x = axis("seconds", [mark.x for mark in marks], log=False)
    y = axis(unit, [mark.y for mark in marks], log=False)
    svg = plot(f"{title} over time", x, y, [Series(title, "winner", marks, dots=False, area=True)], height=220)
    return Chart(title, f"{says}, at the best load of {shown.name(trial, results)}.", svg)
