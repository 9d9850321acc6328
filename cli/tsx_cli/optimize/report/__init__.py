"""The reports of `tsx optimize`: report.html, report.md, results.csv, results.json, and a table with a chart in the terminal."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from tsx_cli.bench.report import facts, page_template
from tsx_cli.bench.report.markdown import plain, table
from tsx_cli.common.output import csv_cell, milliseconds, one_line, print_table
from tsx_cli.common.run_directory import write_files
from tsx_cli.optimize.report.figures import charts, scatter
from tsx_cli.optimize.report.lines import COLUMNS, best_line, heading, name_and_state, subtitle, table_lines, tiles, title
from tsx_cli.optimize.results import OptimizeResults

BY_ITSELF = "Each form is judged by itself with 95 % confidence: of 20 that lose just more than that, about one passes by chance."


def write_report(results: OptimizeResults, directory: Path) -> list[Path]:
    """The files that it has written, each whole or as it was. Raises OSError."""
    contents = {
        "report.html": page(results),
        "report.md": text(results),
        "results.csv": csv_text(results),
        "results.json": results.model_dump_json(indent=1) + "\n",
    }
    return write_files(contents, directory)


def page(results: OptimizeResults) -> str:
    """report.html: one self-contained file for any browser, light and dark."""
    return page_template(Path(__file__).parent).render(
        title=f"tsx optimize: {title(results)}",
        model=title(results),
        subtitle=subtitle(results),
        partial="" if results.complete else "This run is incomplete: the report shows what was measured before it stopped.",
        won=results.best is not None,
        heading=heading(results),
        best=best_line(results),
        tiles=tiles(results),
        why=results.why,
        keys="" if results.best is None else f"forms: [{results.best}]",
        notes=results.notes,
        charts=charts(results),
        sizes=results.batch_sizes,
        columns=COLUMNS,
        lines=table_lines(results),
        others=[form for form in results.forms if not form.sizes],
        facts=_facts(results),
        command=results.command,
    )


def text(results: OptimizeResults) -> str:
    """report.md"""
    head = ("form", *(f"batch {size}" for size in results.batch_sizes), *COLUMNS, "")
    rows = [(each.name, *each.speeds, *each.figures, each.state) for each in table_lines(results)]
    parts = [
        f"# {plain(title(results))}",
        plain(subtitle(results)),
        f"{plain(heading(results))}: **{plain(best_line(results))}**",
        "\n".join(f"- {tile.name}: **{tile.value}** ({plain(tile.beside)})" for tile in tiles(results)),
        plain(results.why),
        "\n".join(f"- {plain(note)}" for note in results.notes),
        "## Forms",
        table(head, rows, right=1),
        "## Forms without figures",
        table(("form", "", "why"), [(form.name, form.state, form.reason) for form in results.forms if not form.sizes]),
        "## Environment and settings",
        table(("", ""), _facts(results)),
        f"## How to reproduce it\n\n    {results.command}" if results.command else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def csv_text(results: OptimizeResults) -> str:
    """results.csv: a row for each form and batch size."""
    file = io.StringIO()
    rows = [row for form in (results.reference, *results.forms) for row in _rows(form.model_dump(exclude={"sizes", "guard"}), form)]
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return file.getvalue()


def _rows(same: dict[str, Any], form: Any) -> list[dict[str, Any]]:
    guard = form.guard
    same |= {"metric": guard and guard.metric, "loss": guard and guard.loss, "loss_bound": guard and guard.loss_bound}
    empty = dict.fromkeys(("batch_size", "median_ms", "reference_ms", "ratio", "low", "high"))
    return [same | each.model_dump() for each in form.sizes] or [same | empty]


def _facts(results: OptimizeResults) -> list[tuple[str, str]]:
    rows = f"{results.calibration_rows} inputs calibrated forms, {results.held_out_rows} others tested them"
    moments = [(name, value) for name, value in facts.moments(results.started, results.ended) if value]
    return [
        ("accepted loss", f"{results.limit}. {BY_ITSELF}"),
        ("rows", rows),
        *facts.common_facts(results.model, results.environment, results.inputs),
        *moments,
    ]


def show(results: OptimizeResults) -> None:
    """Prints the measured forms, the chart, the choice and its reason."""
    head = ("form", *(f"batch {size}" for size in results.batch_sizes), *COLUMNS)
    rows = [(name_and_state(each), *each.speeds, *each.figures) for each in table_lines(results)]
    print_table(head, rows, title=f"{title(results)}: {results.limit}", whole=True)
    reference = ", ".join(f"{milliseconds(each.median_ms)} for {each.batch_size}" for each in results.reference.sizes)
    if reference:
        print(f"The reference takes {reference}; other figures are times its speed.")
    for form in results.forms:
        if form.reason:
            print(one_line(f"{form.name}: {form.state}: {form.reason.splitlines()[0]}"))
    if drawn := scatter(results):
        print()
        print(drawn)
    print()
    print(f"{heading(results)}: {one_line(best_line(results))}")
    print(f"      {one_line(results.why)}")
    for note in results.notes:
        print(f"Note: {one_line(note)}")
