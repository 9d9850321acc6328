"""A report as a page, Markdown, CSV and terminal text, made from the same texts and tables."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from tsx_cli import common
from tsx_cli.bench.report.charts import Chart
from tsx_cli.common.output import csv_cell, one_line, print_table
from tsx_cli.common.run_directory import write_files

INCOMPLETE = "This run is incomplete: the report shows what was measured before it stopped."
NOTE = "note"  # head of a last column with text
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


class ReportTable(NamedTuple):
    """A table.

    The first `texts` columns are text. The others are figures, except a last column NOTE.
    """

    title: str
    says: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    is_folded: bool = False  # applies to the page only


@dataclass(frozen=True)
class ReportContent:
    command_name: str
    title: str
    subtitle: str
    is_complete: bool
    is_chosen: bool
    heading: str
    best: str
    headline: Sequence[tuple[str, str]]  # names and figures
    why: str
    keys: str  # settings in model-config.yaml's format
    notes: Sequence[str]
    charts: Sequence[Chart]
    tables: Sequence[ReportTable]
    failures: Sequence[tuple[str, str]]  # (name, log)
    facts: Sequence[tuple[str, str]]
    command: str
    files_say: str
    files: Sequence[tuple[str, str]] = ()  # (path, command that shows it)


def write(
    report: ReportContent, rows: Sequence[Mapping[str, Any]], json: str, directory: Path
) -> list[Path]:
    """Write the files atomically, and return their paths.

    Raises:
        OSError: A file cannot be written.
    """
    templates = report_templates(Path(__file__).parent)
    templates.filters["plain"] = plain
    context = {**vars(report), "incomplete": INCOMPLETE, "note": NOTE}
    page, markdown = (
        templates.get_template(name).render(context) for name in ("report.html", "report.md.jinja")
    )
    texts = {
        "report.html": page,
        "report.md": re.sub(r"\n{3,}", "\n\n", markdown),
        "results.csv": csv_text(rows),
    }
    return write_files(texts | {"results.json": json}, directory)


def report_templates(directory: Path) -> Environment:
    """Return the templates of a directory, which may include the style of all reports."""
    return Environment(
        loader=FileSystemLoader([directory, Path(common.__path__[0])]),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def plain(text: str) -> str:
    """Escape Markdown's special characters in untrusted text."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    file = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return file.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else csv_cell(value)


def show(
    table: ReportTable, title: str = "", max_rows: int = sys.maxsize, without_note: str = ""
) -> None:
    """Print the first and the marked rows of a table, and their notes except `without_note`."""
    columns = len(table.head) - (table.head[-1] == NOTE)
    rows = [row for index, row in enumerate(table.rows) if index < max_rows or row[0].endswith(")")]
    print_table(
        table.head[:columns],
        [row[:columns] for row in rows],
        title=title or table.title,
        first_only=True,
    )
    for row in rows:
        if (note := "".join(row[columns:])) and note != without_note:
            print(f"{one_line(row[0])}: {one_line(note)}")
    if len(table.rows) > len(rows):
        print(f"and {len(table.rows) - len(rows)} more, in the report")
