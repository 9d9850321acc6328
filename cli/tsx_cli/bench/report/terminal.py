"""The final output of `tsx bench`: the best configurations, the winner, and why."""

from __future__ import annotations

from tsx_cli.bench.model.results import Results
from tsx_cli.bench.report import facts, shown
from tsx_cli.common.output import one_line, print_table

MOST = 12


def show(results: Results) -> None:
    lines = [shown.line(index, results) for index in shown.ordered(results)]
    chosen = [line for place, line in enumerate(lines) if place < MOST or line.mark]
    print_table(
        ("configuration", "", "load", "answers/s", "", "p50", "p99", "errors", ""),
        [(line.name, line.mark, line.load, line.throughput, line.interval, line.p50, line.p99, line.errors, line.note) for line in chosen],
        title=f"{facts.title(results)}: {results.slo or 'no bound'}",
    )
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
