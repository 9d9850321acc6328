"""A row of the input, and its result."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """Between two rows: where a reader goes on."""

    source: int = 0  # number of the file
    offset: int = 0  # in it: bytes of text, or rows of Parquet
    line: int = 1  # of a text, that begins there
    done: int = 0  # of all that there is to read, in the unit of `RowReader.total`
    digest: str = ""  # of what standard input has brought so far


class Row(NamedTuple):
    """One request. A row with an `error` could not be read, and no engine gets it."""

    index: int  # type: ignore[assignment]  # from 0, over all inputs; not the method of tuples
    id: str
    body: bytes
    content_type: str
    next: Position = Position()  # behind it
    error: str | None = None


class RowResult(NamedTuple):
    """The answer to the row of the same index: what the model answered or, with an `error`, why it did not. `status` is that of HTTP."""

    index: int  # type: ignore[assignment]  # not the method of tuples
    id: str
    status: int
    content_type: str
    body: bytes
    error: str | None = None
