"""The charts of the report, made from the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import Curve, CurvePoint, Figure, Point, Results, Stages, Trial
from tsx_cli.bench.load.statistics import QUANTILES, interval, merged, percentile, percentile_figure
from tsx_cli.bench.report import shown
from tsx_cli.bench.report.charts import (
    Axis,
    AxisSpan,
    BarSegment,
    Chart,
    ChartMark,
    Interval,
    LegendEntry,
    ReferenceLine,
    Series,
    axis,
    latency_axis,
    plot,
    stacked,
)
from tsx_cli.bench.search.points import knee_of, open_loops
from tsx_cli.common.output import milliseconds, number

MAX_COLOURED = 5  # configurations with a colour, in addition to the winner and the baseline
MAX_BARS = 8
TIME_CHART_HEIGHT = 220
MAX_OTHER_LINES = 2  # More lines would hide those of the winner and the baseline.
MIN_RATES = 3  # minimum number of rates for a chart of open loops
ERROR_BAR_NOTE = "Error bars are 95 % intervals over the rounds."
STAGES = tuple(name.removesuffix("_ms") for name in Stages.model_fields)
PERCENTILES = [(0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"), (0.9999, "99.99 %")]


def charts(results: Results) -> list[Chart]:
    """Return the charts for which the results have data."""
    makers = (
        frontier,
        by_rate,
        distribution,
        streams,
        stages,
        batch_sizes,
        curves,
        latency_over_time,
    )
    return [chart for make in makers if (chart := make(results)) is not None]


def coloured_trials(results: Results, is_drawn: Callable[[Trial], bool]) -> list[tuple[int, str]]:
    """Return the trials that have a colour: the winner, the baseline, and the best others."""
    chosen = []
    colours = iter(f"s{number}" for number in range(2, 2 + MAX_COLOURED))
    for index in shown.ordered(results):
        if not is_drawn(results.trials[index]):
            continue
        if index == results.winner:
            chosen.append((index, "winner"))
        elif index == results.baseline:
            chosen.append((index, "baseline"))
        elif (colour := next(colours, None)) is not None:
            chosen.append((index, colour))
    return chosen


def frontier(results: Results) -> Chart | None:
    """Draw the throughput and the latency of each load of each configuration."""
    colours = dict(coloured_trials(results, lambda trial: bool(trial.points)))
    if not colours:
        return None
    bounds = shown.bounds(results)
    figure = bounds[0].figure if bounds else "p99_ms"
    lines, marks_drawn = [], []
    for index, trial in enumerate(results.trials):
        points = sorted(
            trial.points,
            key=lambda point: (*_kind(point), point.offered.rate or 0.0, point.offered.connections),
        )
        for _, loop in groupby(points, key=_kind):
            marks = [_mark(point, figure, shown.name(trial, results)) for point in loop]
            marks_drawn += marks
            lines.append(Series(shown.name(trial, results), colours.get(index, "other"), marks))
    lines.sort(
        key=lambda line: [
            "other",
            *(f"s{number}" for number in range(9, 1, -1)),
            "baseline",
            "winner",
        ].index(line.style)
    )
    legend = [
        LegendEntry(style, shown.name(results.trials[index], results))
        for index, style in colours.items()
    ]
    if any(line.style == "other" for line in lines):
        legend.append(LegendEntry("other", "other configurations"))
    rules = [ReferenceLine(bound.limit, bound.text) for bound in bounds if bound.figure == figure]
    x = axis(
        "accepted answers per second",
        [mark.x for mark in marks_drawn],
        log=False,
        bars=[mark.x_interval for mark in marks_drawn],
    )
    y = latency_axis(f"{shown.figure_label(figure)}, ms", marks_drawn, [rule.y for rule in rules])
    return Chart(
        "Throughput and latency",
        "Each point is a measured load; a line joins the closed loops or the open loops of one"
        " configuration. Points further right and lower are better. Hollow points exceed a bound,"
        f" faint ones were disturbed. {ERROR_BAR_NOTE}",
        plot("Throughput and latency of each configuration", x, y, lines, rules),
        legend,
    )


def _kind(point: Point) -> tuple[str, str]:
    """Return a key; loads with the same key are joined by a line."""
    return point.offered.mode, point.offered.arrivals or ""


def _bar(figure: Figure) -> Interval:
    return Interval(figure.low, figure.high)


def _latency_bar(point: Point, figure: str) -> Interval | None:
    if figure == "p99_ms":
        return _bar(point.p99_ms)
    return _bar(percentile_figure(point.counted, figure)) if len(point.counted) > 1 else None


def _mark(point: Point, figure: str, name: str) -> ChartMark:
    value = point.times.get(figure, 0.0)
    throughput = f"{number(point.throughput.value)}/s {shown.margin(point.throughput)}".strip()
    hint = (
        f"{name}\n{point.offered}: {throughput}, {shown.figure_label(figure)} {milliseconds(value)}"
    )
    if point.error_rate:
        hint += f", {shown.share(point.error_rate)} errors"
    if disturbed := shown.disturbed(point):
        hint += f"\n{disturbed}"
    x_interval = _bar(point.throughput)
    faint = any(round_.disturbed for round_ in point.counted)
    return ChartMark(
        point.throughput.value,
        value,
        hint,
        not point.holds,
        x_interval,
        _latency_bar(point, figure),
        faint,
    )


def by_rate(results: Results) -> Chart | None:
    """Draw the latency of open loops up to the knee."""
    trial = shown.detailed_trial(results)
    points = [] if trial is None else open_loops(trial.points)
    if trial is None or len(points) < MIN_RATES:
        return None
    lines = []
    for figure, style in (("p50_ms", "s2"), ("p99_ms", "winner")):
        marks = []
        for point in points:
            mark = _mark(point, figure, shown.name(trial, results))
            marks.append(mark._replace(x=point.offered.rate or 0.0, x_interval=None))
        lines.append(Series(shown.figure_label(figure), style, marks))
    drawn = [mark for line in lines for mark in line.marks]
    highest_holding, lowest_broken = knee_of(points)
    spans = []
    knee = (
        "No rate that was tried holds."
        if highest_holding is None
        else f"Up to {shown.rate(highest_holding)} it holds."
    )
    if highest_holding is not None and lowest_broken is not None:
        knee = (
            f"The knee is between {shown.rate(highest_holding)}, which holds, and {shown.rate(lowest_broken)}, which"
            " does not."
        )
        spans = [
            AxisSpan(
                highest_holding.offered.rate or 0.0, lowest_broken.offered.rate or 0.0, "bad", knee
            )
        ]
    rules = [
        ReferenceLine(bound.limit, bound.text)
        for bound in shown.bounds(results)
        if bound.figure in ("p50_ms", "p99_ms")
    ]
    x = axis("requests per second", [mark.x for mark in drawn], log=False)
    y = latency_axis("ms", drawn, [rule.y for rule in rules])
    return Chart(
        "Latency by rate",
        f"Open loops of {shown.name(trial, results)}: requests arrive whatever the server does."
        f" {knee} {ERROR_BAR_NOTE}",
        plot("Latency by rate", x, y, lines, rules, spans=spans),
        [LegendEntry("winner", "p99"), LegendEntry("s2", "p50")],
    )


def distribution(results: Results) -> Chart | None:
    """Draw the percentiles of the best points, with the winner and the baseline on top."""
    lines: list[Series] = []
    shown_trials = coloured_trials(results, lambda trial: shown.shown_point(trial) is not None)
    winner_and_baseline = [entry for entry in shown_trials if entry[1] in ("winner", "baseline")]
    for index, style in reversed(
        winner_and_baseline
        + [entry for entry in shown_trials if entry not in winner_and_baseline][:MAX_OTHER_LINES]
    ):
        trial = results.trials[index]
        point = shown.shown_point(trial)
        assert point is not None
        name = shown.name(trial, results)
        histogram = merged([round_.histogram for round_ in point.counted])
        latency_levels = [
            (level, value)
            for figure, level in QUANTILES.items()
            if (value := float(getattr(point.latency, figure))) > 0
        ]
        marks = _level_marks(name, _levels(histogram) or latency_levels)
        if marks:
            lines.append(_distribution_bars(point, style, marks[-1].x))
            lines.append(
                Series(f"{name}, {point.offered}", style, marks, dots=len(marks) <= len(QUANTILES))
            )
    return _percentile_chart(
        "Latency distribution",
        "The latency that a share of the answers does not exceed, for each configuration at its"
        f" best load. {ERROR_BAR_NOTE}",
        "Latency by percentile",
        lines,
    )


def _distribution_bars(point: Point, style: str, max_x: float) -> Series:
    """Return the intervals of the usual percentiles."""
    marks = []
    for figure, level in QUANTILES.items():
        position, value = -math.log10(1 - level), float(getattr(point.latency, figure))
        if position <= max_x and (bar := _latency_bar(point, figure)) is not None:
            marks.append(ChartMark(position, value, "", y_interval=bar))
    return Series("", style, marks, dots=False, joined=False)


def _levels(histogram: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """Return pairs of a fraction and its milliseconds, as far as there are enough answers."""
    answers = sum(count for _, count in histogram)
    if not answers:
        return []
    end = min(5.0, max(1.0, math.log10(answers)))
    steps = [end * step / 60 for step in range(61)]
    return [(1 - 10**-step, percentile(histogram, 1 - 10**-step)) for step in steps]


def streams(results: Results) -> Chart | None:
    """Draw percentiles of the time to the first token, per output token and of the whole answer."""
    trial = shown.detailed_trial(results)
    point = None if trial is None else shown.shown_point(trial)
    if trial is None or point is None or point.stream is None:
        return None
    histograms = {
        ("time to first token (TTFT)", "winner"): point.stream.ttft_histogram,
        ("time per output token (TPOT)", "s2"): point.stream.tpot_histogram,
        ("whole answer", "baseline"): merged([round_.histogram for round_ in point.counted]),
    }
    lines = [
        Series(name, style, _level_marks(name, _levels(histogram)), dots=False)
        for (name, style), histogram in histograms.items()
    ]
    bounds = [
        ReferenceLine(bound.limit, bound.text)
        for bound in shown.bounds(results)
        if "." in bound.figure
    ]
    return _percentile_chart(
        "Tokens of a stream",
        "What a share of the answers does not exceed, at the best load of"
        f" {shown.name(trial, results)}. TTFT counts from where the latency does; TPOT is the mean"
        " time of an answer from one token to the next.",
        "Time to first token and per output token",
        lines[::-1],
        bounds,
    )


def _percentile_chart(
    title: str, says: str, label: str, lines: Sequence[Series], bounds: Sequence[ReferenceLine] = ()
) -> Chart | None:
    drawn = [mark for line in lines for mark in line.marks]
    if not drawn:
        return None
    max_x = max(2.0, *(mark.x for mark in drawn))
    named_ticks = [(0.0, "0"), *((-math.log10(1 - level), text) for level, text in PERCENTILES)]
    x = Axis(
        "share of the answers",
        0.0,
        max_x,
        ticks=[tick for tick in named_ticks if tick[0] <= max_x + 1e-9],
    )
    y = axis(
        "ms",
        [*(mark.y for mark in drawn), *(bound.y for bound in bounds)],
        bars=[mark.y_interval for mark in drawn],
    )
    legend = [LegendEntry(line.style, line.name) for line in reversed(lines) if line.joined]
    return Chart(title, says, plot(label, x, y, lines, bounds), legend)


def _level_marks(name: str, levels: Sequence[tuple[float, float]]) -> list[ChartMark]:
    return [
        ChartMark(
            -math.log10(1 - level), value, f"{name}\n{level:.5g} within {milliseconds(value)}"
        )
        for level, value in levels
    ]


def stages(results: Results) -> Chart | None:
    """Draw the stages of a request's mean time."""
    rows = []
    for index, _ in coloured_trials(results, lambda trial: trial.stages is not None)[:MAX_BARS]:
        trial = results.trials[index]
        assert trial.stages is not None
        times = stage_times(trial.stages)
        parts = [
            BarSegment(value, f"c{number}", f"{stage}: {milliseconds(value)}")
            for number, (stage, value) in enumerate(times)
        ]
        point, total_ms = shown.shown_point(trial), sum(value for _, value in times)
        bar = None
        # The interval of the mean over all rounds, shifted to the total of the stages.
        if point is not None and len(point.counted) > 1:
            mean = interval([round_.latency.mean_ms for round_ in point.counted])
            bar = Interval(*(max(0.0, total_ms + end - mean.value) for end in _bar(mean)))
        rows.append((_marked_name(index, results), milliseconds(total_ms), parts, bar))
    if not rows:
        return None
    legend = [LegendEntry(f"c{number}", stage) for number, stage in enumerate(STAGES)]
    return Chart(
        "Where the time goes",
        "The mean time from sending a request to receiving its answer, at the best load of a"
        f" configuration. {ERROR_BAR_NOTE}",
        stacked("Mean time of a request by stage", rows),
        legend,
    )


def stage_times(stages: Stages) -> list[tuple[str, float]]:
    return [(stage, max(0.0, float(getattr(stages, f"{stage}_ms")))) for stage in STAGES]


def _marked_name(index: int, results: Results) -> str:
    mark = (
        " (winner)"
        if index == results.winner
        else " (baseline)"
        if index == results.baseline
        else ""
    )
    return shown.name(results.trials[index], results) + mark


def batch_sizes(results: Results) -> Chart | None:
    trial = shown.detailed_trial(results)
    if trial is None or not trial.batch_sizes:
        return None
    total = sum(trial.batch_sizes.values())
    mean = sum(size * count for size, count in trial.batch_sizes.items()) / total
    rows = [
        (
            f"batch of {size}",
            f"{count / total:.1%}",
            [BarSegment(100 * count / total, "winner", f"{count:,} batches")],
            None,
        )
        for size, count in sorted(trial.batch_sizes.items())
    ]
    return Chart(
        "Batches",
        f"The share of batches by their size, at the best load of {shown.name(trial, results)}:"
        f" {mean:.1f} requests on average.",
        stacked("Batches by size", rows),
    )


def curves(results: Results) -> Chart | None:
    """Draw the throughput of a single worker by batch size."""
    drawn_curves = [curve for curve in results.curves if len(curve.points) > 1]
    if not drawn_curves:
        return None
    lines = []
    for index, curve in enumerate(drawn_curves[:MAX_COLOURED]):
        marks = [
            ChartMark(
                point.batch_size,
                1000 * point.batch_size / point.median_ms,
                f"{_worker(curve)}\nbatch {point.batch_size}: {milliseconds(point.median_ms)} "
                f"({milliseconds(point.low_ms)} to {milliseconds(point.high_ms)})",
                y_interval=_median_bar(point),
            )
            for point in curve.points
            if point.median_ms > 0
        ]
        lines.append(Series(_worker(curve), "winner" if index == 0 else f"s{index + 1}", marks))
    sizes = sorted({int(mark.x) for line in lines for mark in line.marks})
    drawn_marks = [mark for line in lines for mark in line.marks]
    y = axis(
        "requests/s",
        [mark.y for mark in drawn_marks],
        log=False,
        bars=[mark.y_interval for mark in drawn_marks],
    )
    x = Axis(
        "requests in a batch",
        min(sizes) / 1.15,
        max(sizes) * 1.15,
        log=True,
        ticks=[(size, str(size)) for size in sizes],
    )
    return Chart(
        "One worker without a server",
        "Requests per second of a worker that runs batches of one size back to back, measured in"
        " its process. Error bars are 95 % intervals of the median.",
        plot("Throughput of one worker by batch size", x, y, lines),
        [LegendEntry(line.style, line.name) for line in lines] if len(lines) > 1 else (),
    )


def _median_bar(point: CurvePoint) -> Interval:
    """Return the interval of the requests per second.

    It is derived from the usual interval of a median: 1.57 * (q3 - q1) / sqrt(n).
    """
    half_width = 1.57 * (point.high_ms - point.low_ms) / math.sqrt(max(1, point.samples))
    longest_ms, shortest_ms = (
        point.median_ms + half_width,
        max(point.median_ms - half_width, point.low_ms / 2),
    )
    return Interval(*(1000 * point.batch_size / time for time in (longest_ms, shortest_ms)))


def _worker(curve: Curve) -> str:
    return Configuration(**curve.variant._asdict()).worker


def latency_over_time(results: Results) -> Chart | None:
    """Draw all rounds of the best load, one after the other."""
    trial = shown.detailed_trial(results)
    point = None if trial is None else shown.shown_point(trial)
    if trial is None or point is None or not any(round_.over_time for round_ in point.rounds):
        return None
    spans: list[AxisSpan] = []
    lines: list[Series] = []
    offset = length = 0.0
    for round_number, round_ in enumerate(point.rounds, 1):
        ends = [end for end, *_ in round_.over_time]
        if not ends:
            continue
        length = ends[1] - ends[0] if len(ends) > 1 else round_.seconds
        start = offset - (ends[0] - length)  # the end of the warm-up
        if start > offset:
            spans.append(AxisSpan(offset, start, "warm", f"warm-up of round {round_number}"))
        for column, (name, style) in enumerate((("p50", "s2"), ("p99", "winner")), start=2):
            marks = [
                ChartMark(
                    start + interval_values[0] - length / 2, float(interval_values[column]), ""
                )
                for interval_values in round_.over_time
                if interval_values[1]
            ]
            lines.append(Series(f"{name} of round {round_number}", style, marks, dots=False))
        offset = start + ends[-1]
        if round_.disturbed:
            spans.append(
                AxisSpan(
                    start,
                    offset,
                    "disturbed",
                    f"round {round_number}: {'; '.join(round_.disturbed)}",
                )
            )
    rounds = (
        f"{len(point.rounds)} rounds one after the other" if len(point.rounds) > 1 else "one round"
    )
    shaded = (
        ", and rounds that were disturbed"
        if any(span.style == "disturbed" for span in spans)
        else ""
    )
    says = (
        f"of intervals of {length:.2g} s, at the best load of {shown.name(trial, results)}:"
        f" {rounds}. What is shaded is warm-up{shaded}."
    )
    x = axis("seconds", [offset], log=False)
    y = latency_axis("ms", [mark for line in lines for mark in line.marks])
    svg = plot("Latency over time", x, y, lines, spans=spans, height=TIME_CHART_HEIGHT)
    return Chart(
        "Latency over time",
        f"p50 and p99 {says}",
        svg,
        [LegendEntry("winner", "p99"), LegendEntry("s2", "p50")],
    )
