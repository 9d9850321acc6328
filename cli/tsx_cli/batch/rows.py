"""A row of the input, and its result."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """Where a reader goes on: in source number `source` at `offset` (bytes of text, rows of Parquet), whose first line is number `line`."""

    source: int = 0
    offset: int = 0
    line: int = 1


class Row(NamedTuple):
    """One request. With an `error` it could not be read, and no engine gets to see it."""

    index: int  # from 0, over all inputs
    id: str
    body: bytes
    content_type: str
    next: Position = Position()  # of the row behind it
    error: str | None = None


class Result(NamedTuple):
    """The answer to the row of the same index: what the model answered, or, with an `error`, why it did not. `status` is that of HTTP."""

    index: int
    id: str
    status: int
    content_type: str
    body: bytes
    error: str | None = None
