"""The reports of a benchmark: report.html, report.md, results.csv, results.json, and a table in the terminal."""

from __future__ import annotations

from pathlib import Path

from tsx_archiver.storage.atomic_file import whole_file
from tsx_cli.bench.model.results import Results
from tsx_cli.bench.report.markdown import markdown
from tsx_cli.bench.report.page import page
from tsx_cli.bench.report.rows import csv_text
from tsx_cli.bench.report.terminal import show

__all__ = ["show", "write_report"]


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
