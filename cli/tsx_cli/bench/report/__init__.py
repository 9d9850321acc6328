"""The reports of a benchmark: a page, Markdown, results.csv, results.json and the terminal."""

from __future__ import annotations

from pathlib import Path

from tsx_cli.bench.load.results import Results
from tsx_cli.bench.report import facts, render, shown, tables
from tsx_cli.bench.report.figures import charts
from tsx_cli.common.output import one_line

MAX_SHOWN_CONFIGURATIONS = 12  # rows in the terminal
FILES_NOTE = (
    "results.csv has a row for each load, results.json has everything; tsx bench compare compares"
    " two such files."
)


def write_report(results: Results, directory: Path) -> list[Path]:
    """Write the files; they link to files of a profile in the directory.

    Raises:
        OSError: A file cannot be written.
    """
    report = render.ReportContent(
        command_name="tsx bench",
        title=facts.title(results),
        subtitle=facts.subtitle(results),
        is_complete=results.complete,
        is_chosen=results.winner is not None or results.against is not None,
        heading=facts.heading(results),
        best=facts.best(results),
        headline=tables.headline(results),
        why=results.why,
        keys=facts.keys(results),
        notes=results.notes,
        charts=charts(results),
        tables=tables.tables(results),
        failures=facts.failures(results),
        facts=facts.facts(results),
        command=results.command,
        files_say=FILES_NOTE,
        files=facts.files(directory),
    )
    json = results.model_dump_json(indent=1) + "\n"
    return render.write(report, list(tables.csv_rows(results)), json, directory)


def show(results: Results) -> None:
    """Print the best configurations, the winner, and the reason why it won."""
    title = f"{facts.title(results)}: {results.slo or 'no bound'}"
    render.show(tables.configurations(results), title, MAX_SHOWN_CONFIGURATIONS, shown.ENDED_BEFORE)
    print()
    if results.winner is None:
        print(one_line(results.why or f"{facts.best(results)}."))
    else:
        print(f"Best: {one_line(facts.best(results))}")
        print(f"      {one_line(results.why)}")
    show_details(results)
    for note in results.notes:
        print(f"Note: {one_line(note)}")
    if not results.complete:
        print(f"Note: {render.INCOMPLETE}")


def show_details(results: Results) -> None:
    """Print tables about the configuration of the summary: streams, input sizes and starts."""
    trial = shown.detailed_trial(results)
    if shown.summary_point(results) is None or trial is None:
        return
    for table in tables.details([trial], results):
        if table.rows:
            print()
            render.show(table)
