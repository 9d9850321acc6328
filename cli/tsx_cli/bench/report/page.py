"""report.html: one self-contained file for any browser, light and dark."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tsx_cli.bench.model.results import Results
from tsx_cli.bench.report import facts, shown
from tsx_cli.bench.report.figures import charts


def page(results: Results, directory: Path) -> str:
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
