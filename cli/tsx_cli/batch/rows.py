"""A row of the input, its result, and what makes the one of the other."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple, Protocol


class Position(NamedTuple):
    """Between two rows: where a reader goes on."""

    source: int = 0  # number of the file
    offset: int = 0  # in it: bytes of text, or rows of Parquet
    line: int = 1  # of a text, that begins there
    done: int = 0  # of all that there is to read, in the unit of `InputReader.total`
    digest: str = ""  # of what standard input has brought so far


class RowResult(NamedTuple):
    """The answer to the row of the same index: what the model answered or, with an `error`, why it
    did not. `status` is that of HTTP.
    """

    index: int  # type: ignore[assignment]  # not the method of tuples
    id: str
    status: int
    content_type: str
    body: bytes
    error: str | None = None


class Row(NamedTuple):
    """One request. A row with an `error` could not be read."""

    index: int  # type: ignore[assignment]  # from 0, over all inputs; not the method of tuples
    id: str
    body: bytes
    content_type: str
    next: Position = Position()  # behind it
    error: str | None = None

    def failed(self, status: int, error: str) -> RowResult:
        return RowResult(self.index, self.id, status, "", b"", error)


class BatchEngine(Protocol):
    """What computes the results: this machine, a cluster, a service."""

    batch_size: int | None  # once it is known

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        """One result for each row, in the order of the rows; a row with an `error` is answered with
        that.

        It takes rows ahead of its results within a bound of its own, from one thread. `rows` ends
        early where the run is to stop: what was taken is still answered. Raises CliError or
        TsxError where no further row can succeed.
        """
