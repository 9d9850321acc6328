"""A row of the input, its result, and the protocol of the engines."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple, Protocol


class Position(NamedTuple):
    """A position between two rows, at which a reader can continue."""

    source: int = 0  # index of the file
    offset: int = 0  # bytes of a text file, or rows of Parquet
    line: int = 1  # number of the line that begins at the offset
    done: int = 0  # progress, in the unit of `InputReader.total`
    digest: str = ""  # digest of the standard input so far


class RowResult(NamedTuple):
    """The response to the row of the same index.

    The body is the model's response. If there is none, `error` gives the reason. `status` is an
    HTTP status.
    """

    index: int  # type: ignore[assignment]  # hides a method of tuples
    id: str
    status: int
    content_type: str
    body: bytes
    error: str | None = None


class Row(NamedTuple):
    """A request. A row with an `error` could not be read."""

    index: int  # type: ignore[assignment]  # index in all inputs; hides a method of tuples
    id: str
    body: bytes
    content_type: str
    next_position: Position = Position()
    error: str | None = None

    def failed(self, status: int, error: str) -> RowResult:
        return RowResult(self.index, self.id, status, "", b"", error)


class BatchEngine(Protocol):
    """An engine that computes the results: this machine, a cluster, or a service."""

    batch_size: int | None  # None until it is known

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        """Yield one result per row, in the order of the rows.

        A row with an `error` gets a result with that error. The engine takes rows from one thread,
        and only a limited number of them ahead of its results. If `rows` ends early, the run stops
        after it has yielded the results of all taken rows.

        Raises:
            CliError: No further row can succeed.
            TsxError: No further row can succeed.
        """
