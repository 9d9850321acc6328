"""The output of commands: tables for people, JSON for programs, and plain columns without a
terminal.
"""

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
    """A number of bytes as people write it."""
    from tsx_archiver.limits import (
        human,
    )  # here, as it imports all of archives, and help must be quick

    return human(size)


def number(value: float) -> str:
    """Three digits that say something, and no more: 12,345; 123; 12.3; 0.0123."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    digits = 1 if size >= 9.995 else 2 if size >= 0.9995 else 3 if size >= 0.09995 else 4
    return f"{value:.{digits}f}"


def milliseconds(value: float) -> str:
    """A duration as people write it: 0.123 ms, 12.3 ms, 1.73 s."""
    return f"{number(value / 1000)} s" if value >= 999.5 else f"{number(value)} ms"


def print_json(value: object) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    print(UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def print_result(value: Result, as_json: bool, show: Callable[[Result], None]) -> None:
    """For programs as JSON, for people as `show` prints it."""
    if as_json:
        print_json(value)
    else:
        show(value)


def one_line(value: object) -> str:
    """Untrusted text as one line without terminal control characters."""
    return escaped(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def csv_cell(value: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would run as a formula. Numbers stay."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    title: str | None = None,
    *,
    whole: bool = False,
) -> None:
    """Where the terminal is narrow, cells are wrapped, between words if these fit; with `whole`
    those of the first column only.
    """
    cells = [["" if cell is None else one_line(cell) for cell in row] for row in (columns, *rows)]
    console = Console()
    if not console.is_terminal:
        print_columns(cells)
        return
    title = None if title is None else escape(one_line(title))  # rich takes `[a]` for markup
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column, width in zip(cells[0], _widths(cells, console.width, whole=whole), strict=True):
        table.add_column(Text(column), overflow="fold", width=width)
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    console.print(table)


def _widths(rows: Sequence[Sequence[str]], room: int, *, whole: bool) -> list[int | None]:
    """Of the columns of a table in a terminal, if it is too narrow for whole cells and wide enough
    for their words; else None.
    """
    table = list(zip(*rows, strict=True))
    full = [max(map(len, column)) for column in table]
    least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in table]
    if whole:
        least[1:] = full[1:]
    spare = room - 3 * len(table) - sum(least)  # each with the space around it
    missing = sum(full) - sum(least)
    if spare < 0 or spare >= missing:
        return [None] * len(table)
    return [need + spare * (most - need) // missing for need, most in zip(least, full, strict=True)]


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Whole lines, for a program that reads them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
