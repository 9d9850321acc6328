"""The reader of the inputs' rows from any position on."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

from tsx_cli.batch.rows import Position, Row
from tsx_cli.batch.s3 import S3
from tsx_cli.batch.sources import FILES, STDIN, Source, Sources
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.shared.content_types import BYTES, JSON, TEXT, guess_content_type

MAX_ROW_BYTES = 1 << 30
MAX_OPEN_FILES = 16
MAX_READ_AHEAD_BYTES = 64 << 20


class RowFormat(NamedTuple):
    """The fields of a row that are sent and that are its id; by default the whole row is sent."""

    field: str | None = None
    id_field: str | None = None


class InputReader:
    """The rows of files, here or in S3, or of standard input, in a fixed order.

    `total` is the value of `Position.done` at the end: rows if it is `exact`, else bytes; None for
    standard input. `fingerprint` is JSON that changes with the rows.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        format: str | None = None,
        rows: RowFormat | None = None,
        s3: S3 | None = None,
    ) -> None:
        """Find the files of the inputs.

        Raises:
            UsageError: The options contradict the inputs.
            CliError: There are no files, or they cannot be read.
        """
        self.sources, self._rows = Sources(inputs, format, s3 or S3()), rows or RowFormat()
        digest, count, size, self.exact = self.sources.survey()
        if not count:
            raise CliError(f"there are no files in {', '.join(inputs)}")
        if self.exact and self._rows != RowFormat():
            raise UsageError(
                "--field and --id-field name a field of a row, and here each row is a whole file;"
                " leave them out"
            )
        self.total = None if self.sources.stdin else count if self.exact else size
        self.fingerprint: dict[str, Any] = {
            "inputs": digest,
            "files": count,
            "bytes": size,
            **self._rows._asdict(),
        }

    def rows(self, start: Position, index: int) -> Generator[Row, None, None]:
        """Yield the rows from `start` on; the first one gets `index`.

        Raises:
            CliError: No further row can be read.
        """
        for number, row in enumerate(self._read_all(start), index):
            yield row._replace(index=number)

    def _read_all(self, start: Position) -> Iterator[Row]:
        files: deque[tuple[Future[Row], int]] = deque()
        done = ahead = 0
        pool = ThreadPoolExecutor(MAX_OPEN_FILES)
        try:
            for number, source in enumerate(self.sources):
                begin = start if number == start.source else Position(number, done=done)
                done += 1 if self.exact else source.size
                if number < start.source:
                    continue
                if source.format == FILES:
                    files.append(
                        (
                            pool.submit(self._read_file, source, Position(number + 1, done=done)),
                            source.size,
                        )
                    )
                    ahead += source.size
                while files and (
                    source.format != FILES
                    or len(files) > 2 * MAX_OPEN_FILES
                    or ahead > MAX_READ_AHEAD_BYTES
                ):
                    ahead -= files[0][1]
                    yield files.popleft()[0].result()
                if source.format != FILES:
                    yield from self._read_records(source, begin, done - source.size)
            while files:
                yield files.popleft()[0].result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _read_file(self, source: Source, next: Position) -> Row:
        if source.size > MAX_ROW_BYTES:
            return unreadable(
                source.name,
                next,
                f"it has {source.size} bytes, and a row has {MAX_ROW_BYTES} at most",
            )
        try:
            with self.sources.open(source) as file:
                body = file.read()
        except (OSError, CliError) as error:
            return unreadable(source.name, next, error)
        return Row(0, source.name, body, guess_content_type(source.name, body), next)

    def _read_records(self, source: Source, start: Position, done: int) -> Iterator[Row]:
        """Yield the rows of a source, at whose beginning the progress is `done`."""
        formats: dict[str, Callable[[Source, BinaryIO, Position, int], Iterator[Row]]]
        formats = {"jsonl": self._json_lines, "csv": self._csv, "parquet": self._parquet}
        try:
            with self.sources.open(source) as file:
                yield from formats[source.format](source, file, start, done)
        except (OSError, csv.Error, ValueError, NotImplementedError) as error:
            # pyarrow raises ValueError and NotImplementedError.
            raise CliError(
                f"{source.url} cannot be read ({getattr(error, 'strerror', None) or error})"
            ) from error

    def _json_lines(
        self, source: Source, file: BinaryIO, start: Position, done: int
    ) -> Iterator[Row]:
        for at, after, line in _lines(source, file, start):
            id, body = f"{source.name}:{at.line}", line.strip()
            if not body:
                continue
            try:
                values = json.loads(body)
            except (ValueError, RecursionError) as error:
                yield unreadable(id, after, error)
            else:
                yield (
                    Row(0, id, body, JSON, after)
                    if self._rows == (None, None)
                    else self._row(id, values, after)
                )

    def _csv(self, source: Source, file: BinaryIO, start: Position, done: int) -> Iterator[Row]:
        after = Position()

        def lines(begin: Position) -> Iterator[str]:
            nonlocal after
            for at, line_end, line in _lines(source, file, begin):
                after = line_end
                yield line.decode("utf-8", "surrogateescape").removeprefix(
                    "" if at.offset else "\ufeff"
                )

        csv.field_size_limit(MAX_ROW_BYTES)
        text = lines(Position(start.source, done=done))
        columns = next(csv.reader(text), [])
        if source.url == STDIN:  # Standard input cannot be read again.
            while after.offset < start.offset and next(text, None) is not None:
                pass
            _check_stdin(start, after.digest)
        elif start.offset > after.offset:
            text = lines(start)
        records = csv.reader(text)
        cells: list[str] | None = []
        while cells is not None:
            id, error = f"{source.name}:{max(start, after).line}", ""
            try:
                cells = next(records, None)
            except csv.Error as csv_error:
                cells, error = ["?"], str(csv_error)
            if cells and len(cells) != len(columns):
                error = (
                    error or f"it has {len(cells)} columns, and the first line names {len(columns)}"
                )
            if cells:
                values = dict(zip(columns, cells, strict=False))
                yield unreadable(id, after, error) if error else self._row(id, values, after)

    def _parquet(self, source: Source, file: BinaryIO, start: Position, done: int) -> Iterator[Row]:
        opened, at = pyarrow_parquet().ParquetFile(file), 0
        for group in range(opened.num_row_groups):
            if (size := opened.metadata.row_group(group).num_rows) + at <= start.offset:
                at += size
                continue
            for batch in opened.iter_batches(1024, row_groups=[group]):
                for values in batch.to_pylist():
                    at += 1
                    if at > start.offset:
                        next = Position(
                            start.source,
                            at,
                            done=done + source.size * at // opened.metadata.num_rows,
                        )
                        yield self._row(f"{source.name}:{at}", values, next)

    def _row(self, id: str, values: Any, next: Position) -> Row:
        try:
            id = id if self._rows.id_field is None else _as_text(str(values[self._rows.id_field]))
            value = values if self._rows.field is None else values[self._rows.field]
            if isinstance(value, bytes):
                return Row(0, id, value, BYTES, next)
            if isinstance(value, str):
                return Row(0, id, value.encode(), TEXT, next)
            return Row(
                0, id, json.dumps(value, ensure_ascii=False, default=_plain).encode(), JSON, next
            )
        except KeyError as error:
            return unreadable(id, next, f"it has no {error}, but {', '.join(values)}")
        except (TypeError, ValueError) as error:  # The row is no object, or not UTF-8.
            return unreadable(id, next, error)


def unreadable(id: str, next: Position, error: object) -> Row:
    return Row(0, id, b"", "", next, _as_text(f"the row cannot be read: {error}"))


def _as_text(text: str) -> str:
    """Replace halves of surrogate pairs, which UTF-8 cannot have, by `?`."""
    return text.encode("utf-8", "replace").decode()


def pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet  # an extra
    except ImportError as error:
        raise CliError("Parquet needs pyarrow: pip install 'tsx-serve[parquet]'") from error
    return pyarrow.parquet


def _lines(
    source: Source, file: BinaryIO, start: Position
) -> Iterator[tuple[Position, Position, bytes]]:
    """Yield each line with the positions before and after it.

    Positions in standard input have a digest of the text before them.
    """
    at, digest = start, hashlib.sha256() if source.url == STDIN else None
    if digest is None:
        file.seek(start.offset)
    else:
        remaining = start.offset
        while remaining and (part := file.read(min(remaining, 1 << 20))):
            digest.update(part)
            remaining -= len(part)
        _check_stdin(start, digest.hexdigest())
    while line := file.readline(MAX_ROW_BYTES):
        if len(line) == MAX_ROW_BYTES:
            raise CliError(
                f"{source.url}, line {at.line}, has more than {MAX_ROW_BYTES} bytes; are there"
                " lines in it?"
            )
        if digest is not None:
            digest.update(line)
        after = Position(
            at.source,
            at.offset + len(line),
            at.line + 1,
            at.done + len(line),
            digest.hexdigest() if digest else "",
        )
        yield at, after, line
        at = after


def _check_stdin(start: Position, digest: str) -> None:
    """Check the digest of the text before `start`.

    Raises:
        CliError: Standard input has other rows than before.
    """
    if start.offset and digest != start.digest:
        raise CliError(
            "standard input does not begin with the rows that the output has already; start over"
            " with --restart"
        )


def _plain(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
