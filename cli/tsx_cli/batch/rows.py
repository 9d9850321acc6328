"""A row of the input, its result, and the protocol of the engines."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple, Protocol


class Position(NamedTuple):
    """A position between two rows, at which a reader can continue."""

    source: int = 0  # number of the file
    offset: int = 0  # bytes of a text file, or rows of Parquet
    line: int = 1  # the line of a text that begins there
    done: int = 0  # progress in the unit of `InputReader.total`
    digest: str = ""  # digest of the standard input so far


class RowResult(NamedTuple):
    """The answer to the row of the same index.

    It is the model's answer or, with an `error`, the reason why there is none. `status` is a status
    of HTTP.
    """

    index: int  # type: ignore[assignment]  # hides a method of tuples
    id: str
    status: int
    content_type: str
    body: bytes
    error: str | None = None


class Row(NamedTuple):
    """A request. A row with an `error` could not be read."""

    index: int  # type: ignore[assignment]  # counts all inputs; hides a method of tuples
    id: str
    body: bytes
    content_type: str
    next: Position = Position()  # the position after the row
    error: str | None = None

    def failed(self, status: int, error: str) -> RowResult:
        return RowResult(self.index, self.id, status, "", b"", error)


class BatchEngine(Protocol):
    """An engine that computes the results: this machine, a cluster, or a service."""

    batch_size: int | None  # None until it is known

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        """Yield one result per row, in the order of the rows.

        A row with an `error` gets a result with that error. The engine takes a bounded number of
        rows ahead of its results, from one thread. If `rows` ends early, the run stops, and the
        rows that were taken are still answered.

        Raises:
            CliError: No further row can succeed.
            TsxError: No further row can succeed.
        """
