"""The texts and figures that all reports of a run share."""

from __future__ import annotations

from typing import NamedTuple

from tsx_cli.bench.report.facts import Tile, machine
from tsx_cli.bench.report.shown import moment
from tsx_cli.common.output import milliseconds
from tsx_cli.optimize.results import FormResult, OptimizeResults, SizeFigures

COLUMNS = ("loss", "at most", "files", "memory", "load")
GOOD = ("kept", "passed")


class FormLine(NamedTuple):
    """A row of a table."""

    name: str
    label: str
    state: str
    good: bool
    speeds: tuple[str, ...]  # for each batch size
    figures: tuple[str, ...]  # as COLUMNS
    note: str


def table_lines(results: OptimizeResults) -> list[FormLine]:
    """The reference and all measured forms, the fastest first."""
    measured = [form for form in results.forms if form.sizes]
    ordered = sorted([results.reference, *measured], key=lambda form: -(1.0 if form is results.reference else form.speedup or 0.0))
    return [_line(form, results) for form in ordered]


def _line(form: FormResult, results: OptimizeResults) -> FormLine:
    known = {each.batch_size: each for each in form.sizes}
    own = form is results.reference
    speeds = tuple(_speed(known.get(size), own) for size in results.batch_sizes)
    guard = form.guard
    figures = (
        "" if guard is None else percent(guard.loss),
        "" if guard is None else percent(guard.loss_bound),
        "" if form.size_mib is None else f"{form.size_mib:,.1f} MiB",
        "" if form.memory_mib is None else f"{form.memory_mib:,.0f} MiB",
        "" if form.load_seconds is None else f"{form.load_seconds:.1f} s",
    )
    state = "best" if form.name == results.best else "reference" if own else form.state
    return FormLine(form.name, form.label, state, form.state in GOOD or own, speeds, figures, form.reason)


def name_and_state(line: FormLine) -> str:
    return line.name if line.state == "reference" else f"{line.name} ({line.state})"


def _speed(figures: SizeFigures | None, own: bool) -> str:
    if figures is None:
        return ""
    return milliseconds(figures.median_ms) if own else f"{figures.ratio:.2f}x [{figures.low:.2f}, {figures.high:.2f}]"


def percent(value: float) -> str:
    return f"{value:+.2%}" if value else "0 %"


def title(results: OptimizeResults) -> str:
    return f"{results.model.name} {results.model.version}" if results.model.version else results.model.name


def subtitle(results: OptimizeResults) -> str:
    return f"tsx optimize, {moment(results.started)}, on {machine(results.environment)}; {results.limit}"


def heading(results: OptimizeResults) -> str:
    return "The model as it is stays" if results.best is None else "Best form"


def best_form(results: OptimizeResults) -> FormResult:
    return next((form for form in results.forms if form.name == results.best), results.reference)


def best_line(results: OptimizeResults) -> str:
    best = best_form(results)
    return f"{best.name} ({best.label})" if best.label and best.label != best.name else best.name


def tiles(results: OptimizeResults) -> list[Tile]:
    best = best_form(results)
    if best is results.reference or best.guard is None:
        return []
    found = [
        Tile(f"speed at batch {each.batch_size}", f"{each.ratio:.2f} x", f"95 % interval {each.low:.2f} to {each.high:.2f}")
        for each in best.sizes
    ]
    loss = f"at most {percent(best.guard.loss_bound)}, with 95 % confidence, by {best.guard.rows} rows"
    found.append(Tile(f"loss ({best.guard.metric})", percent(best.guard.loss), loss))
    if best.memory_mib is not None and results.reference.memory_mib is not None:
        found.append(
            Tile("memory of a worker", f"{best.memory_mib:,.0f} MiB", f"the reference takes {results.reference.memory_mib:,.0f} MiB")
        )
    return found
