"""The output of commands: tables, JSON, and plain columns if there is no terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tsx_runtime.shared.log_format import UNSAFE, escaped
from tsx_runtime.shared.log_format import rounded as rounded

Result = TypeVar("Result")
FORMULA = re.compile(r"(?![-+]?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?\Z)[=+@\t\r-]")


def human(size: int) -> str:
    """Format a number of bytes: 1.5 GB."""
    from tsx_archiver.limits import human  # a slow import

    return human(size)


def number(value: float) -> str:
    """Format a number with three significant digits: 12,345; 123; 12.3; 0.0123."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    digits = 1 if size >= 9.995 else 2 if size >= 0.9995 else 3 if size >= 0.09995 else 4
    return f"{value:.{digits}f}"


def milliseconds(value: float) -> str:
    """Format a duration: 0.123 ms, 12.3 ms, 1.73 s."""
    return f"{number(value / 1000)} s" if value >= 999.5 else f"{number(value)} ms"


def print_json(value: object) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    print(UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def print_result(value: Result, as_json: bool, show: Callable[[Result], None]) -> None:
    """Print a result as JSON, or for people by `show`."""
    if as_json:
        print_json(value)
    else:
        show(value)


def one_line(value: object) -> str:
    """Escape untrusted text: the result is one line without terminal control characters."""
    return escaped(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def plain(text: str) -> str:
    """Return a text that JSON and files can store; surrogates are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def csv_cell(value: object) -> object:
    """Prefix an apostrophe to a text that a spreadsheet would run as a formula."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    title: str | None = None,
    *,
    first_only: bool = False,
) -> None:
    """Print a table, or plain columns if there is no terminal.

    In a narrow terminal cells are wrapped, between words if the words fit.

    Args:
        columns: The headings.
        rows: The cells.
        title: The title.
        first_only: Whether only the first column may be wrapped.
    """
    cells = [["" if cell is None else one_line(cell) for cell in row] for row in (columns, *rows)]
    console = Console()
    if not console.is_terminal:
        print_columns(cells)
        return
    title = None if title is None else escape(one_line(title))  # For rich, `[a]` is markup.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column, width in zip(
        cells[0], _widths(cells, console.width, first_only=first_only), strict=True
    ):
        table.add_column(Text(column), overflow="fold", width=width)
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    console.print(table)


def _widths(
    rows: Sequence[Sequence[str]], terminal_width: int, *, first_only: bool
) -> list[int | None]:
    """Return widths of columns that fit the terminal, between full cells and single words.

    Each width is None if full cells fit, or if single words do not fit.
    """
    table = list(zip(*rows, strict=True))
    full_widths = [max(map(len, column)) for column in table]
    min_widths = [
        max(len(text) for cell in column for text in cell.split() or [""]) for column in table
    ]
    if first_only:
        min_widths[1:] = full_widths[1:]
    spare = terminal_width - 3 * len(table) - sum(min_widths)  # including the space around columns
    missing = sum(full_widths) - sum(min_widths)
    if spare < 0 or spare >= missing:
        return [None] * len(table)
    return [
        min_width + spare * (full_width - min_width) // missing
        for min_width, full_width in zip(min_widths, full_widths, strict=True)
    ]


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows as aligned columns without borders."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
