"""The reader of the inputs' rows, which can start at any position."""

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
    """The fields of a row that contain the request and the id; by default the whole row is sent."""

    field: str | None = None
    id_field: str | None = None


class InputReader:
    """The rows of local files, of files in S3 or of standard input, in a fixed order.

    `total` is the final value of `Position.done`, in rows if `exact`, otherwise in bytes; it is
    None for standard input. `fingerprint` is JSON that changes when the rows change.
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
        """Yield the rows from `start` on; the first row gets `index`.

        Raises:
            CliError: No further row can be read.
        """
        for number, row in enumerate(self._read_all(start), index):
            yield row._replace(index=number)

    def _read_all(self, start: Position) -> Iterator[Row]:
        files: deque[tuple[Future[Row], int]] = deque()
        done = read_ahead_bytes = 0
        pool = ThreadPoolExecutor(MAX_OPEN_FILES)
        try:
            for number, source in enumerate(self.sources):
                first_position = start if number == start.source else Position(number, done=done)
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
                    read_ahead_bytes += source.size
                while files and (
                    source.format != FILES
                    or len(files) > 2 * MAX_OPEN_FILES
                    or read_ahead_bytes > MAX_READ_AHEAD_BYTES
                ):
                    read_ahead_bytes -= files[0][1]
                    yield files.popleft()[0].result()
                if source.format != FILES:
                    yield from self._read_records(source, first_position, done - source.size)
            while files:
                yield files.popleft()[0].result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _read_file(self, source: Source, next_position: Position) -> Row:
        if source.size > MAX_ROW_BYTES:
            return unreadable(
                source.name,
                next_position,
                f"it has {source.size} bytes, and a row has {MAX_ROW_BYTES} at most",
            )
        try:
            with self.sources.open(source) as file:
                body = file.read()
        except (OSError, CliError) as error:
            return unreadable(source.name, next_position, error)
        return Row(0, source.name, body, guess_content_type(source.name, body), next_position)

    def _read_records(self, source: Source, start: Position, done: int) -> Iterator[Row]:
        """Yield the rows of a source from `start` on; `done` is the progress before the source."""
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
        for position, next_position, line in _lines(source, file, start):
            id, body = f"{source.name}:{position.line}", line.strip()
            if not body:
                continue
            try:
                values = json.loads(body)
            except (ValueError, RecursionError) as error:
                yield unreadable(id, next_position, error)
            else:
                yield (
                    Row(0, id, body, JSON, next_position)
                    if self._rows == (None, None)
                    else self._row(id, values, next_position)
                )

    def _csv(self, source: Source, file: BinaryIO, start: Position, done: int) -> Iterator[Row]:
        next_position = Position()

        def lines(begin: Position) -> Iterator[str]:
            nonlocal next_position
            for position, line_end_position, line in _lines(source, file, begin):
                next_position = line_end_position
                yield line.decode("utf-8", "surrogateescape").removeprefix(
                    "" if position.offset else "\ufeff"
                )

        csv.field_size_limit(MAX_ROW_BYTES)
        text = lines(Position(start.source, done=done))
        columns = next(csv.reader(text), [])
        if source.url == STDIN:  # Standard input cannot be read again.
            while next_position.offset < start.offset and next(text, None) is not None:
                pass
            _check_stdin(start, next_position.digest)
        elif start.offset > next_position.offset:
            text = lines(start)
        records = csv.reader(text)
        cells: list[str] | None = []
        while cells is not None:
            id, error = f"{source.name}:{max(start, next_position).line}", ""
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
                yield (
                    unreadable(id, next_position, error)
                    if error
                    else self._row(id, values, next_position)
                )

    def _parquet(self, source: Source, file: BinaryIO, start: Position, done: int) -> Iterator[Row]:
        parquet_file, row_number = pyarrow_parquet().ParquetFile(file), 0
        for group in range(parquet_file.num_row_groups):
            if (
                size := parquet_file.metadata.row_group(group).num_rows
            ) + row_number <= start.offset:
                row_number += size
                continue
            for batch in parquet_file.iter_batches(1024, row_groups=[group]):
                for values in batch.to_pylist():
                    row_number += 1
                    if row_number > start.offset:
                        next_position = Position(
                            start.source,
                            row_number,
                            done=done + source.size * row_number // parquet_file.metadata.num_rows,
                        )
                        yield self._row(f"{source.name}:{row_number}", values, next_position)

    def _row(self, id: str, values: Any, next_position: Position) -> Row:
        try:
            id = id if self._rows.id_field is None else _as_text(str(values[self._rows.id_field]))
            value = values if self._rows.field is None else values[self._rows.field]
            if isinstance(value, bytes):
                return Row(0, id, value, BYTES, next_position)
            if isinstance(value, str):
                return Row(0, id, value.encode(), TEXT, next_position)
            return Row(
                0,
                id,
                json.dumps(value, ensure_ascii=False, default=_json_default).encode(),
                JSON,
                next_position,
            )
        except KeyError as error:
            return unreadable(id, next_position, f"it has no {error}, but {', '.join(values)}")
        except (TypeError, ValueError) as error:  # The row is not an object, or is not UTF-8.
            return unreadable(id, next_position, error)


def unreadable(id: str, next_position: Position, error: object) -> Row:
    return Row(0, id, b"", "", next_position, _as_text(f"the row cannot be read: {error}"))


def _as_text(text: str) -> str:
    """Replace unpaired surrogates, which UTF-8 cannot represent, by `?`."""
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

    Positions in standard input contain a digest of the preceding text.
    """
    position, digest = start, hashlib.sha256() if source.url == STDIN else None
    if digest is None:
        file.seek(start.offset)
    else:
        remaining = start.offset
        while remaining and (block := file.read(min(remaining, 1 << 20))):
            digest.update(block)
            remaining -= len(block)
        _check_stdin(start, digest.hexdigest())
    while line := file.readline(MAX_ROW_BYTES):
        if len(line) == MAX_ROW_BYTES:
            raise CliError(
                f"{source.url}, line {position.line}, has more than {MAX_ROW_BYTES} bytes; are there"
                " lines in it?"
            )
        if digest is not None:
            digest.update(line)
        next_position = Position(
            position.source,
            position.offset + len(line),
            position.line + 1,
            position.done + len(line),
            digest.hexdigest() if digest else "",
        )
        yield position, next_position, line
        position = next_position


def _check_stdin(start: Position, digest: str) -> None:
    """Check the digest of the text before `start`.

    Raises:
        CliError: Standard input begins with other rows than in the earlier run.
    """
    if start.offset and digest != start.digest:
        raise CliError(
            "standard input does not begin with the rows that the output has already; start over"
            " with --restart"
        )


def _json_default(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
