"""The reports of a benchmark: report.html, report.md, results.csv, results.json, and a table in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from tsx_cli.bench.model.results import Results
from tsx_cli.bench.report import facts, over_time, shown
from tsx_cli.bench.report.figures import charts
from tsx_cli.bench.report.markdown import markdown
from tsx_cli.bench.report.rows import csv_text
from tsx_cli.common.output import milliseconds, number, one_line, print_table
from tsx_cli.common.run_directory import write_files

MOST = 12  # configurations on a terminal


def write_report(results: Results, directory: Path) -> list[Path]:
    """The files that it has written, each whole or as it was. What lies in `directory`/profile is linked. Raises OSError."""
    contents = {
        "report.html": page(results, directory),
        "report.md": markdown(results, directory),
        "results.csv": csv_text(results),
        "results.json": results.model_dump_json(indent=1) + "\n",
    }
    return write_files(contents, directory)


def page(results: Results, directory: Path) -> str:
    """report.html: one self-contained file for any browser, light and dark."""
    return page_template(Path(__file__).parent).render(
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
        cost_column=shown.cost_column(results),
        tables=[each for each in _tables(results) if each[-1]],
        failures=facts.failures(results),
        points=facts.points(results),
        facts=facts.facts(results),
        command=results.command,
        files=facts.files(directory),
    )


def page_template(directory: Path) -> Template:
    """`page.html` of that directory, which may extend `base.html` of this one."""
    loader = FileSystemLoader([directory, Path(__file__).parent])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True).get_template("page.html")


def _tables(results: Results) -> list[tuple[str, str, Sequence[str], Sequence[Sequence[str]]]]:
    """(title, explanation, head, rows)"""
    cold = "A server's start until it is ready, its first answer after that, and its median latency once warm, at its lightest load."
    by_size = f"Latency by the size of the input, at {facts.best(results)}."
    tokens = (
        "TTFT is the time to the first token, TPOT the time per output token after it; tokens are those that were generated. "
        "Goodput is the answers per second of which each kept the bounds of time by itself."
    )
    return [
        ("Streams of tokens", tokens, facts.STREAMS, facts.streams(results)),
        ("By size of the input", by_size, facts.SIZES, facts.sizes(results)),
        ("Cold and warm", cold, facts.COLD, facts.cold(results)),
    ]


def show(results: Results) -> None:
    """At the end, on the terminal: the best configurations, the winner, and why."""
    lines = [shown.line(index, results) for index in shown.ordered(results)]
    chosen = [line for place, line in enumerate(lines) if place < MOST or line.mark]
    rows = []
    for line in chosen:
        name, reached = f"{line.name} ({line.mark})" if line.mark else line.name, f"{line.throughput} {line.interval}".strip()
        figures = (line.short_load, reached, line.p50, line.p99, line.errors, *([line.cost] if results.price_per_hour is not None else []))
        rows.append((name, *(figure.replace("about ", "~") for figure in figures)))
    title = f"{facts.title(results)}: {results.slo or 'no bound'}"
    print_table(("configuration", "load", "answers/s", "p50", "p99", "errors", *shown.cost_column(results)), rows, title=title, whole=True)
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
    for detail in details(results):
        print(f"      {detail}")
    for note in results.notes:
        print(f"Note: {one_line(note)}")
    if not results.complete:
        print(f"Note: {facts.partial(results)}")


def details(results: Results) -> Iterator[str]:
    """Lines about the summary's configuration: its start, its course over time, and its latency by the size of the input."""
    point = facts.summary_point(results)
    name = facts.best(results)
    for line in [each for each in facts.cold(results) if each.name == name][:1]:
        yield f"cold: ready after {line.ready}, first answer {line.first}; warm p50 {line.warm}"
    if point is not None and (stream := point.stream) is not None:
        good = "" if stream.goodput is None else f"; goodput {number(stream.goodput)} answers/s"
        prompts = f", {number(stream.prompt_tokens_per_second)} prompt tokens/s" if stream.prompt_tokens else ""
        yield f"{number(stream.tokens_per_second)} tokens/s{prompts}{good}"
        for name, times in (("time to first token", stream.ttft), ("time per output token", stream.tpot)):
            yield f"{name}: p50 {milliseconds(times.p50_ms)}, p99 {milliseconds(times.p99_ms)}, slowest {milliseconds(times.max_ms)}"
    if point is not None and (drawn := over_time.spark_line(point)):
        yield f"p99 over time: {drawn}"
    for each in facts.sizes(results):
        yield f"{each.answers} inputs of {each.sizes}: p50 {each.p50}, p99 {each.p99}"
