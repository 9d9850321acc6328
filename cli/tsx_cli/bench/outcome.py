"""What a run says at its end: a table of what was measured, the winner and why, and where the rest is."""

from __future__ import annotations

from pathlib import Path

from tsx_cli.bench.report import show
from tsx_cli.bench.results import Results
from tsx_cli.output import print_json


def tell(results: Results, directory: Path, written: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json(results.model_dump(mode="json"))
        return
    show(results)
    if written is not None:
        print(written)
    print(f"report: {directory / 'report.html'}, with report.md, results.csv and results.json beside it")
