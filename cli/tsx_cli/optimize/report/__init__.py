"""The reports of `tsx optimize`: a page, Markdown, results.csv, results.json and the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tsx_cli.bench.report import facts, render, shown
from tsx_cli.bench.report.render import NOTE, ReportContent, ReportTable
from tsx_cli.common.output import milliseconds, one_line
from tsx_cli.optimize.report.figures import charts, percent
from tsx_cli.optimize.results import FormResult, OptimizeResults, SizeFigures

CONFIDENCE_NOTE = (
    "Each form is judged by itself with 95 % confidence: of 20 that lose just more than that, about"
    " one passes by chance."
)
FILES_NOTE = (
    "Speeds are times the reference's, with 95 % intervals; the loss is at most the second figure"
    " with 95 % confidence. results.csv has a row for each form and batch size, results.json has"
    " everything."
)


def write_report(results: OptimizeResults, directory: Path) -> list[Path]:
    """Write the files atomically, and return their paths.

    Raises:
        OSError: A file cannot be written.
    """
    unmeasured = [
        [form.name, form.label, form.state, form.reason] for form in results.forms if not form.sizes
    ]
    table = forms(results)
    report = ReportContent(
        command_name="tsx optimize",
        title=_title(results),
        subtitle=(
            f"tsx optimize, {shown.moment(results.started)}, on"
            f" {facts.machine(results.environment)}; {results.limit}"
        ),
        is_complete=results.complete,
        is_chosen=results.best is not None,
        heading=_heading(results),
        best=_best_line(results),
        headline=_headline(table, results),
        why=results.why,
        keys="" if results.best is None else f"forms: [{results.best}]",
        notes=results.notes,
        charts=charts(results),
        tables=[
            table,
            ReportTable(
                "Forms without figures", "", ("form", "in words", "state", NOTE), unmeasured, 3
            ),
        ],
        failures=[],
        facts=_facts(results),
        command=results.command,
        files_say=FILES_NOTE,
    )
    return render.write(
        report, list(_csv_rows(results)), results.model_dump_json(indent=1) + "\n", directory
    )


def forms(results: OptimizeResults) -> ReportTable:
    """Return a table with a row for the reference and each measured form, the fastest first."""
    measured = [results.reference, *(form for form in results.forms if form.sizes)]
    measured.sort(key=lambda form: -(1.0 if form is results.reference else form.speedup or 0.0))
    head = (
        "form",
        *(f"batch {size}" for size in results.batch_sizes),
        "loss",
        "at most",
        "files",
        "memory",
        "load",
        NOTE,
    )
    return ReportTable("Measured forms", "", head, [_row(form, results) for form in measured])


def _headline(table: ReportTable, results: OptimizeResults) -> list[tuple[str, str]]:
    """Return the names and figures of the best form, or nothing if no form is better."""
    best = next((row for row in table.rows if row[0] == f"{results.best} (best)"), None)
    return [] if best is None else [*zip(table.head[1:-1], best[1:-1], strict=True)]


def _row(form: FormResult, results: OptimizeResults) -> list[str]:
    sizes = {figures.batch_size: figures for figures in form.sizes}
    guard, is_reference = form.guard, form is results.reference
    state = "best" if form.name == results.best else form.state
    return [
        form.name if is_reference else f"{form.name} ({state})",
        *(_speed(sizes.get(size), is_reference) for size in results.batch_sizes),
        "" if guard is None else percent(guard.loss),
        "" if guard is None else percent(guard.loss_bound),
        "" if form.size_mib is None else f"{form.size_mib:,.1f} MiB",
        "" if form.memory_mib is None else f"{form.memory_mib:,.0f} MiB",
        "" if form.load_seconds is None else f"{form.load_seconds:.1f} s",
        form.reason,
    ]


def _speed(figures: SizeFigures | None, is_reference: bool) -> str:
    if figures is None:
        return ""
    return (
        milliseconds(figures.median_ms)
        if is_reference
        else f"{figures.ratio:.2f}x [{figures.low:.2f}, {figures.high:.2f}]"
    )


def _csv_rows(results: OptimizeResults) -> Iterator[dict[str, Any]]:
    """Yield a row for each form and batch size."""
    for form in (results.reference, *results.forms):
        row = form.model_dump(exclude={"sizes", "guard"})
        if form.guard is not None:
            row |= {
                "metric": form.guard.metric,
                "loss": form.guard.loss,
                "loss_bound": form.guard.loss_bound,
            }
        yield from [row | figures.model_dump() for figures in form.sizes] or [row]


def _title(results: OptimizeResults) -> str:
    return (
        f"{results.model.name} {results.model.version}"
        if results.model.version
        else results.model.name
    )


def _heading(results: OptimizeResults) -> str:
    return "The model as it is stays" if results.best is None else "Best form"


def _best_form(results: OptimizeResults) -> FormResult:
    return next((form for form in results.forms if form.name == results.best), results.reference)


def _best_line(results: OptimizeResults) -> str:
    best = _best_form(results)
    return f"{best.name} ({best.label})" if best.label and best.label != best.name else best.name


def _facts(results: OptimizeResults) -> list[tuple[str, str]]:
    return [
        ("accepted loss", f"{results.limit}. {CONFIDENCE_NOTE}"),
        (
            "rows",
            (
                f"{results.calibration_rows} inputs calibrated forms, {results.held_out_rows}"
                " others tested them"
            ),
        ),
        *facts.common_facts(results.model, results.environment, results.inputs),
        *((name, value) for name, value in facts.moments(results.started, results.ended) if value),
    ]


def show(results: OptimizeResults) -> None:
    """Print the measured forms, the choice, and the reason for it."""
    table = forms(results)
    columns = len(table.head) - 1
    render.show(
        table._replace(head=table.head[:columns], rows=[row[:columns] for row in table.rows]),
        f"{_title(results)}: {results.limit}",
    )
    for form in results.forms:
        if form.reason:
            print(one_line(f"{form.name}: {form.state}: {form.reason.splitlines()[0]}"))
    print()
    print(f"{_heading(results)}: {one_line(_best_line(results))}")
    print(f"      {one_line(results.why)}")
    for note in results.notes:
        print(f"Note: {one_line(note)}")
