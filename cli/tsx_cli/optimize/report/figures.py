"""The charts of a run: speed against loss, and speed against memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tsx_cli.bench.report.charts import Chart, ChartMark, Interval, LegendEntry, Series, axis, plot
from tsx_cli.optimize.results import FormResult, OptimizeResults

GOOD_STATES = ("kept", "passed")
STYLES = ("winner", "s2", "other", "baseline")
NAMES = (
    "the best",
    "accurate and faster",
    "not accurate enough, not proven to be, or not faster",
    "the reference",
)


def charts(results: OptimizeResults) -> list[Chart]:
    measured = [form for form in results.forms if form.speedup is not None]
    if not measured:
        return []
    lossy = [form for form in measured if form.guard is not None]
    figures = [
        _pareto(
            results, lossy, "Speed and loss", "loss, %", lambda form: 100 * max(0.0, form.guard.loss) if form.guard else 0.0,
            "Further right is faster, lower loses less. Consider a form if no other is both."
        ),
        _pareto(
            results, [form for form in measured if form.memory_mib], "Speed and memory", "memory of a worker, MiB",
            lambda form: form.memory_mib or 0.0, "Further right is faster, lower takes less memory."
        ),
    ]  # fmt: skip
    return [chart for chart in figures if chart is not None]


def _pareto(
    results: OptimizeResults,
    forms: Sequence[FormResult],
    title: str,
    label: str,
    height: Callable[[FormResult], float],
    text: str,
) -> Chart | None:
    if not forms:
        return None
    groups: dict[str, list[ChartMark]] = {style: [] for style in STYLES}
    groups["baseline"].append(ChartMark(1.0, height(results.reference), "reference"))
    for form in forms:
        groups[_style(form, results)].append(_mark(form, height(form)))
    marks = [mark for group in groups.values() for mark in group]
    x = axis(
        "times as fast as the reference",
        [mark.x for mark in marks],
        log=False,
        bars=[mark.x_interval for mark in marks],
    )
    y = axis(label, [mark.y for mark in marks], log=False)
    series = [
        Series(name, style, groups[style], joined=False)
        for style, name in zip(STYLES, NAMES, strict=True)
    ]
    legend = [
        LegendEntry(style, name) for style, name in zip(STYLES, NAMES, strict=True) if groups[style]
    ]
    return Chart(
        title,
        f"{text} Hollow: the loss is not proven to be within the limit. Bars are 95 % intervals.",
        plot(title, x, y, series[::-1]),
        legend,
    )


def _style(form: FormResult, results: OptimizeResults) -> str:
    if form.name == results.best:
        return "winner"
    return "s2" if form.state in GOOD_STATES else "other"


def _mark(form: FormResult, y: float) -> ChartMark:
    guard = form.guard
    loss = (
        ""
        if guard is None
        else f", loss {percent(guard.loss)} (at most {percent(guard.loss_bound)})"
    )
    hint = f"{form.name}: {form.speedup or 0:.2f} times as fast{loss}, {form.state}"
    bar = (
        None
        if form.speedup_low is None or form.speedup_high is None
        else Interval(form.speedup_low, form.speedup_high)
    )
    return ChartMark(form.speedup or 0.0, y, hint, guard is None or not guard.passed, bar)


def percent(value: float) -> str:
    return f"{value:+.2%}" if value else "0 %"
