"""The charts of a run: speed against loss and against memory, for a page; speed against loss for a terminal."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence

from tsx_cli.bench.report.charts import Chart, ChartMark, Interval, LegendEntry, Series, axis, plot
from tsx_cli.optimize.report.lines import GOOD, percent
from tsx_cli.optimize.results import FormResult, OptimizeResults

WIDTH, HEIGHT = 56, 12  # characters of the chart in a terminal
STYLES = ("winner", "s2", "other", "baseline")
NAMES = ("the best", "accurate and faster", "not accurate enough, not proven to be, or not faster", "the reference")


def charts(results: OptimizeResults) -> list[Chart]:
    measured = [form for form in results.forms if form.speedup is not None]
    if not measured:
        return []
    lossy = [form for form in measured if form.guard is not None]
    found = [
        _pareto(
            results, lossy, "Speed and loss", "loss, %", lambda form: 100 * max(0.0, form.guard.loss) if form.guard else 0.0,
            "Further right is faster, lower loses less. Consider a form if no other is both."
        ),
        _pareto(
            results, [form for form in measured if form.memory_mib], "Speed and memory", "memory of a worker, MiB",
            lambda form: form.memory_mib or 0.0, "Further right is faster, lower takes less memory."
        ),
    ]  # fmt: skip
    return [chart for chart in found if chart is not None]


def _pareto(
    results: OptimizeResults, forms: Sequence[FormResult], title: str, label: str, height: Callable[[FormResult], float], says: str
) -> Chart | None:
    if not forms:
        return None
    groups: dict[str, list[ChartMark]] = {style: [] for style in STYLES}
    groups["baseline"].append(ChartMark(1.0, height(results.reference), "reference"))
    for form in forms:
        groups[_style(form, results)].append(_mark(form, height(form)))
    marks = [mark for group in groups.values() for mark in group]
    x = axis("times as fast as the reference", [mark.x for mark in marks], log=False, bars=[mark.across for mark in marks])
    y = axis(label, [mark.y for mark in marks], log=False)
    series = [Series(name, style, groups[style], joined=False) for style, name in zip(STYLES, NAMES, strict=True)]
    legend = [LegendEntry(style, name) for style, name in zip(STYLES, NAMES, strict=True) if groups[style]]
    return Chart(
        title,
        f"{says} Hollow: the loss is not proven to be within the limit. Bars are 95 % intervals.",
        plot(title, x, y, series[::-1]),
        legend,
    )


def _style(form: FormResult, results: OptimizeResults) -> str:
    if form.name == results.best:
        return "winner"
    return "s2" if form.state in GOOD else "other"


def _mark(form: FormResult, y: float) -> ChartMark:
    guard = form.guard
    loss = "" if guard is None else f", loss {percent(guard.loss)} (at most {percent(guard.loss_bound)})"
    hint = f"{form.name}: {form.speedup or 0:.2f} times as fast{loss}, {form.state}"
    bar = None if form.speedup_low is None or form.speedup_high is None else Interval(form.speedup_low, form.speedup_high)
    return ChartMark(form.speedup or 0.0, y, hint, guard is None or not guard.passed, bar)


def scatter(results: OptimizeResults) -> str:
    """Speed against loss for a terminal, with a letter for each form; empty if there are fewer than two, or none loses anything."""
    judged = [form for form in results.forms if form.speedup and form.guard is not None]
    forms = sorted(judged, key=lambda form: -(form.speedup or 0.0))[: len(string.ascii_lowercase)]
    most = max((form.guard.loss for form in forms if form.guard), default=0.0)
    if len(forms) < 2 or most <= 0:
        return ""
    fastest = max(1.0, *(form.speedup or 0.0 for form in forms))
    rows = [[" "] * (WIDTH + 1) for _ in range(HEIGHT + 1)]
    legend = []
    for letter, form in [*zip(string.ascii_lowercase, forms, strict=False), ("*", None)][::-1]:
        speed, loss = (1.0, 0.0) if form is None or form.guard is None else (form.speedup or 0.0, max(0.0, form.guard.loss))
        rows[HEIGHT - round(loss / most * HEIGHT)][round(speed / fastest * WIDTH)] = letter
        legend.append(f"{letter} {'reference' if form is None else form.name}")
    axis_names = [f"{percent(most):>8} |", *["         |"] * (HEIGHT - 1), "     0 % |"]
    drawn = [f"{name}{''.join(row)}".rstrip() for name, row in zip(axis_names, rows, strict=True)]
    end = f"{fastest:.{0 if math.isclose(fastest, round(fastest)) else 1}f}x"
    below = f"{'':9}+{'-' * WIDTH}\n{'':10}0x{end:>{WIDTH - 2}}"
    return "\n".join(["Loss (upwards) and speed (to the right):", *drawn, below, "  ".join(legend[::-1])])
