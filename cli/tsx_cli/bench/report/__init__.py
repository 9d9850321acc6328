"""The reports of a benchmark: report.html, report.md, results.csv, results.json, and a table in the terminal."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tsx_archiver.storage.atomic_file import whole_file
from tsx_cli.bench.model.results import Results
from tsx_cli.bench.report import facts, shown
from tsx_cli.bench.report.figures import charts
from tsx_cli.bench.report.markdown import markdown
from tsx_cli.bench.report.rows import csv_text
from tsx_cli.common.output import one_line, print_table

MOST = 12  # configurations on a terminal


def write_report(results: Results, directory: Path) -> list[Path]:
    """The files that it has written, each whole or as it was. What lies in `directory`/profile is linked. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    contents = {
        "report.html": page(results, directory),
        "report.md": markdown(results, directory),
        "results.csv": csv_text(results),
        "results.json": results.model_dump_json(indent=1) + "\n",
    }
    for name, text in contents.items():
        with whole_file(directory / name, durable=False) as file:
            file.write(text.encode())
    return [directory / name for name in contents]


def page(results: Results, directory: Path) -> str:
    """report.html: one self-contained file for any browser, light and dark."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("page.html").render(
        title=f"tsx bench: {facts.title(results)}",
        model=facts.title(results),
        subtitle=facts.subtitle(results),
        partial=facts.partial(results),
        won=results.winner is not None or results.against is not None,
        heading=facts.heading(results),
        best=facts.best(results),
        tiles=facts.tiles(results),
        why=results.why,
        keys=facts.keys(results),
        notes=results.notes,
        charts=charts(results),
        lines=[shown.line(index, results) for index in shown.ordered(results)],
        none_sign=shown.NONE,
        failures=facts.failures(results),
        points=facts.points(results),
        facts=facts.facts(results),
        command=results.command,
        files=facts.files(directory),
    )


def show(results: Results) -> None:
    """At the end, on the terminal: the best configurations, the winner, and why."""
    lines = [shown.line(index, results) for index in shown.ordered(results)]
    chosen = [line for place, line in enumerate(lines) if place < MOST or line.mark]
    rows = []
    for line in chosen:
        name, reached = f"{line.name} ({line.mark})" if line.mark else line.name, f"{line.throughput} {line.interval}".strip()
        figures = (line.short_load, reached, line.p50, line.p99, line.errors)
        rows.append((name, *(figure.replace("about ", "~") for figure in figures)))
    title = f"{facts.title(results)}: {results.slo or 'no bound'}"
    print_table(("configuration", "load", "answers/s", "p50", "p99", "errors"), rows, title=title, whole=True)
    for line in chosen:
        if line.note and line.note != shown.ENDED_BEFORE:  # these rows show by their figures that they are predicted
            print(f"{line.name}: {one_line(line.note)}")
    if len(lines) > len(chosen):
        print(f"and {len(lines) - len(chosen)} more, in the report")
    print()
    if results.winner is None:
        print(one_line(results.why or f"{facts.best(results)}."))
    else:
        print(f"Best: {one_line(facts.best(results))}")
        print(f"      {one_line(results.why)}")
    for note in results.notes:
        print(f"Note: {one_line(note)}")
    if not results.complete:
        print(f"Note: {facts.partial(results)}")
