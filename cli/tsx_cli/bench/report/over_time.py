"""Charts of the course of a measurement: latency, throughput, and what the server's processes used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tsx_cli.bench.model.results import Point, Results, Round, Usage
from tsx_cli.bench.report import shown
from tsx_cli.bench.report.charts import AxisSpan, Chart, ChartMark, LegendEntry, Series, axis, latency_axis, plot
from tsx_cli.common.output import milliseconds, number

SIGNS = "▁▂▃▄▅▆▇█"
SPARKS = 40  # signs of a line in a terminal
HEIGHT = 220


class Moment(NamedTuple):
    """An interval of a round."""

    middle: float  # seconds
    per_second: float
    p50_ms: float
    p99_ms: float


def charts(results: Results) -> Iterator[Chart]:
    trial = shown.told_trial(results)
    point = None if trial is None else shown.shown_point(trial)
    if trial is None or point is None:
        return
    where = f"at the best load of {shown.name(trial, results)}"
    if any(each.over_time for each in point.rounds):
        yield from _of_rounds(point, where)
    for title, unit, value, says in (
        ("CPU", "cores", lambda usage: usage.cpu, "Cores that the server's processes used"),
        ("Memory", "MiB", lambda usage: usage.memory_mib, "Memory of the server's processes"),
        ("GPU", "%", _gpu_share, "Share of the time in which the GPU ran"),
    ):
        chart = _of_usage(title, unit, trial.usage, value, f"{says}, {where}.")
        if chart is not None:
            yield chart


def moments(one: Round) -> tuple[list[Moment], float]:
    """Of a round, with 0 where it begins to count; and the length of an interval."""
    ends = [end for end, *_ in one.over_time]
    length = ends[1] - ends[0] if len(ends) > 1 else one.seconds
    return [Moment(end - length / 2, count / length, p50, p99) for end, count, p50, p99 in one.over_time if length > 0], length


def _of_rounds(point: Point, where: str) -> Iterator[Chart]:
    """All rounds one after the other."""
    spans: list[AxisSpan] = []
    lines: dict[str, list[Series]] = {"p50": [], "p99": [], "rate": []}
    offset = length = 0.0
    for turn, one in enumerate(point.rounds, 1):
        course, length = moments(one)
        if not course:
            continue
        start = offset - (course[0].middle - length / 2)  # where the round begins to count
        if start > offset:
            spans.append(AxisSpan(offset, start, "warm", f"warm-up of round {turn}"))
        for name, style, field in (("p50", "s2", "p50_ms"), ("p99", "winner", "p99_ms"), ("rate", "winner", "per_second")):
            told = [moment for moment in course if moment.per_second or name == "rate"]
            marks = [ChartMark(start + moment.middle, float(getattr(moment, field)), "") for moment in told]
            lines[name].append(Series(f"{name} of round {turn}", style, marks, dots=False))
        offset = start + course[-1].middle + length / 2
        if one.disturbed:
            spans.append(AxisSpan(start, offset, "disturbed", f"round {turn}: {'; '.join(one.disturbed)}"))
    rounds = f"{len(point.rounds)} rounds one after the other" if len(point.rounds) > 1 else "one round"
    shaded = ", and rounds that were disturbed" if any(span.style == "disturbed" for span in spans) else ""
    says = f"of intervals of {length:.2g} s, {where}: {rounds}. What is shaded is warm-up{shaded}."
    x = axis("seconds", [offset], log=False)
    y = latency_axis("ms", [mark for name in ("p50", "p99") for line in lines[name] for mark in line.marks])
    svg = plot("Latency over time", x, y, [*lines["p50"], *lines["p99"]], spans=spans, height=HEIGHT)
    yield Chart("Latency over time", f"p50 and p99 {says}", svg, [LegendEntry("winner", "p99"), LegendEntry("s2", "p50")])
    y = axis("answers/s", [mark.y for line in lines["rate"] for mark in line.marks], log=False)
    svg = plot("Throughput over time", x, y, lines["rate"], spans=spans, height=HEIGHT)
    yield Chart("Throughput over time", f"Accepted answers {says}", svg)


def spark_line(point: Point) -> str:
    """The p99 of its intervals in a line of text, without warm-ups; empty where they are not known."""
    told = [moment.p99_ms for one in point.counted for moment in moments(one)[0] if moment.middle > 0 and moment.per_second]
    if len(told) < 2:
        return ""
    size = -(-len(told) // SPARKS)
    grouped = [max(told[at : at + size]) for at in range(0, len(told), size)]
    low, high = min(grouped), max(grouped)
    signs = "".join(SIGNS[round((value - low) / ((high - low) or 1.0) * (len(SIGNS) - 1))] for value in grouped)
    return f"{signs} {milliseconds(low)} to {milliseconds(high)}"


def _gpu_share(usage: Usage) -> float | None:
    return None if usage.gpu is None else 100 * usage.gpu


def _of_usage(title: str, unit: str, usage: Sequence[Usage], value: Callable[[Usage], float | None], says: str) -> Chart | None:
    marks = [
        ChartMark(each.at_seconds, level, f"{each.at_seconds:.1f} s: {number(level)} {unit}")
        for each in usage
        if (level := value(each)) is not None
    ]
    if len(marks) < 2:
        return None
    if 0 < marks[0].x <= 2 * (marks[1].x - marks[0].x):  # the first sample is of the time up to it
        marks.insert(0, marks[0]._replace(x=0.0))
    x = axis("seconds", [mark.x for mark in marks], log=False)
    y = axis(unit, [mark.y for mark in marks], log=False)
    svg = plot(f"{title} over time", x, y, [Series(title, "winner", marks, dots=False, area=True)], height=HEIGHT)
    return Chart(title, says, svg)
