"""report.md: the figures for a repository, a pull request or a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tsx_cli.bench.model.results import Results
from tsx_cli.bench.report import facts, figures, shown
from tsx_cli.common.output import milliseconds

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def markdown(results: Results, directory: Path) -> str:
    parts = [f"# {plain(facts.title(results))}", plain(facts.subtitle(results))]
    if not results.complete:
        parts.append(f"**{facts.partial(results)}**")
    parts.append(f"{plain(facts.heading(results))}: **{plain(facts.best(results))}**")
    parts += ["\n".join(f"- {tile.name}: **{tile.value}** ({plain(tile.beside)})" for tile in facts.tiles(results)), plain(results.why)]
    if facts.keys(results):
        parts.append(f"```yaml\n{facts.keys(results)}\n```")
    parts += ["\n".join(f"- {plain(note)}" for note in results.notes), "## All configurations", _trials(results)]
    parts += [
        _section("Streams of tokens", facts.STREAMS, facts.streams(results)),
        _section("By size of the input", facts.SIZES, facts.sizes(results)),
        _section("Cold and warm", facts.COLD, facts.cold(results)),
    ]
    parts += [_stages(results), "## All measured loads", _points(results)]
    parts += ["## Environment and settings", table(("", ""), facts.facts(results))]
    if results.command:
        parts += ["## How to reproduce it", f"    {results.command}"]
    left = facts.files(directory)
    if left:
        parts.append(
            "Profiles: " + ", ".join(f"[{plain(file)}]({file})" + (f" (`{command}`)" if command else "") for file, command in left)
        )
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: str) -> str:
    """Untrusted text with Markdown's special characters escaped."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, right: int = 99) -> str:
    """Columns from the `right`-th on are figures."""
    text = [[plain(str(cell)) for cell in row] for row in rows]
    if not text:
        return ""
    rule = ["---:" if column >= right else "---" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(head), rule, *text])


def _trials(results: Results) -> str:
    lines, priced = [shown.line(index, results) for index in shown.ordered(results)], results.price_per_hour is not None
    return table(
        ("configuration", "", "best load", "", "answers/s", "", "p50", "p99", "errors", *shown.cost_column(results)),
        [
            (*line[:3], line.note, line.throughput, line.interval, line.p50, line.p99, line.errors, *([line.cost] if priced else []))
            for line in lines
        ],
        right=4,
    )


def _section(heading: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return f"## {heading}\n\n{table(head, rows, right=1)}" if rows else ""


def _stages(results: Results) -> str:
    rows = []
    for index in shown.ordered(results):
        text = results.trials[index].stages
        if text is not None:
            rows.append((shown.name(results.trials[index], results), *(milliseconds(value) for _, value in figures.stage_times(text))))
    return _section("Where the time goes", ("mean time of a request", *figures.STAGES), rows)


def _points(results: Results) -> str:
    figures_of = ("answers/s", "mean", "p50", "p90", "p99", "p99.9", "slowest", "errors", *shown.cost_column(results))
    head = ("configuration", "load", *figures_of, "rounds", "bounds")
    return table(head, [(*point.text, *point.figures, point.bounds) for point in facts.points(results)], right=2)
