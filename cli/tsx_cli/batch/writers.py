"""The output: results as JSON lines, CSV or Parquet, or as a file each."""

from __future__ import annotations

import base64
import csv
import io
import json
import mimetypes
import sys
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Protocol, TypeAlias

from tsx_cli.batch.readers import pyarrow_parquet
from tsx_cli.batch.rows import RowResult
from tsx_cli.batch.stores import OutputStore, file_name
from tsx_cli.common.failure import CliError
from tsx_cli.common.output import csv_cell

_NAMES = "names.json"  # of the files of the last part
COLUMNS = ("id", "status", "output", "error")


class Writer(Protocol):
    """Raises OSError, CliError."""

    fingerprint: str  # the same only where it writes the same

    def write(self, part: int, results: Sequence[RowResult]) -> None:
        """Part by part, from 1; on the disk on return.

        The last may come again, with the same rows first: that one counts.
        """

    def finish(self, parts: int) -> None:
        """All parts are written. May be called again."""


class FileWriter:
    """One file, made of its parts once they are all there."""

    def __init__(self, store: OutputStore, format: RowEncoding) -> None:
        self._store, self._format, self.fingerprint = store, format, format.name

    def write(self, part: int, results: Sequence[RowResult]) -> None:
        self._store.put(f"{part:08}.part", self._format.encode(results))

    def finish(self, parts: int) -> None:
        self._store.publish(
            lambda file: self._format.join(map(self._read, range(1, parts + 1)), file)
        )

    def _read(self, part: int) -> bytes:
        if (content := self._store.read(f"{part:08}.part")) is None:
            raise CliError(
                f"{self._store.output}: part {part} of the unfinished run is gone; start over with"
                " --restart"
            )
        return content


class StreamWriter:
    """Standard output."""

    def __init__(self, format: RowEncoding) -> None:
        self._format, self.fingerprint = format, format.name

    def write(self, part: int, results: Sequence[RowResult]) -> None:
        content = self._format.encode(results)
        if part == 1:
            self._format.join(iter([content]), sys.stdout.buffer)
        else:
            sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()

    def finish(self, parts: int) -> None:
        pass


class DirectoryWriter:
    """A file each, by the row's id; `numbered` where ids may repeat."""

    def __init__(self, store: OutputStore, *, numbered: bool) -> None:
        self._store, self._numbered, self.fingerprint = store, numbered, "directory"

    def write(self, part: int, results: Sequence[RowResult]) -> None:
        """Names go to the disk first: a row that is answered again may get another name, and its
        first file must go.
        """
        files = dict(map(self._file, results))
        before, names = json.loads(self._store.read(_NAMES) or b"[0, []]")
        if before == part:
            self._store.remove_files(names)
        self._store.put(_NAMES, json.dumps([part, list(files)]).encode())
        self._store.add_files(files)

    def finish(self, parts: int) -> None:
        self._store.publish(None)

    def _file(self, result: RowResult) -> tuple[str, bytes]:
        name = (
            f"{result.index:09}-{file_name(result.id.replace('/', '_'))}"
            if self._numbered
            else file_name(result.id)
        )
        if result.error is not None:
            return f"{name}.error.json", json.dumps(_error(result)).encode()
        return name + (mimetypes.guess_extension(_media_type(result)) or ".bin"), result.body


class JsonLinesEncoding:
    """{"id": ..., "output": ...} a row: JSON as it is, text as a string; other bytes as
    `output_base64`, with their `content_type`.
    """

    name = "jsonl"

    def encode(self, results: Sequence[RowResult]) -> bytes:
        return b"".join(map(_json_line, results))

    def join(self, parts: Iterator[bytes], file: BinaryIO) -> None:
        file.writelines(parts)


class CsvEncoding:
    """A first line of COLUMNS; JSON as its text, other bytes in base64."""

    name = "csv"

    def encode(self, results: Sequence[RowResult]) -> bytes:
        texts = ((row, "" if row.error is not None else _text(row)) for row in results)
        cells = ((row, text if _is_binary(row) else csv_cell(text)) for row, text in texts)
        return _csv(
            (csv_cell(row.id), row.status, cell, csv_cell(row.error)) for row, cell in cells
        )

    def join(self, parts: Iterator[bytes], file: BinaryIO) -> None:
        file.write(_csv([COLUMNS]))
        file.writelines(parts)


class ParquetEncoding:
    """COLUMNS and the content type; a part is a file, and at least one row group of the whole.

    Binary answers are in `output_bytes`.
    """

    name = "parquet"

    def __init__(self) -> None:
        """Raises CliError where the extra is missing."""
        self._parquet = pyarrow_parquet()

    def encode(self, results: Sequence[RowResult]) -> bytes:
        import pyarrow as pa

        columns: list[list[Any]] = [[], [], [], [], [], []]
        for each in results:
            text = None if each.error is not None or _is_binary(each) else _text(each)
            data = each.body if each.error is None and text is None else None
            for column, value in zip(
                columns,
                (each.id, each.status, text, data, each.content_type, each.error),
                strict=True,
            ):
                column.append(value)
        with io.BytesIO() as file:
            self._parquet.write_table(
                pa.Table.from_arrays(
                    [pa.array(c, t) for c, t in zip(columns, self._schema.types, strict=True)],
                    schema=self._schema,
                ),
                file,
            )
            return file.getvalue()

    def join(self, parts: Iterator[bytes], file: BinaryIO) -> None:
        with self._parquet.ParquetWriter(file, self._schema) as writer:
            for part in parts:
                writer.write_table(self._parquet.read_table(io.BytesIO(part)))

    @property
    def _schema(self) -> Any:
        import pyarrow as pa  # an extra

        text = pa.string()
        fields = {
            "id": text,
            "status": pa.int32(),
            "output": text,
            "output_bytes": pa.binary(),
            "content_type": text,
            "error": text,
        }
        return pa.schema(list(fields.items()))


RowEncoding: TypeAlias = JsonLinesEncoding | CsvEncoding | ParquetEncoding
ENCODINGS: dict[str, type[RowEncoding]] = {
    "jsonl": JsonLinesEncoding,
    "csv": CsvEncoding,
    "parquet": ParquetEncoding,
}


def _media_type(result: RowResult) -> str:
    return result.content_type.partition(";")[0].strip().lower()


def _is_json(result: RowResult) -> bool:
    kind = _media_type(result)
    return kind == "application/json" or kind.endswith("+json")


def _is_binary(result: RowResult) -> bool:
    if _is_json(result) or _media_type(result).startswith("text/"):
        try:
            result.body.decode()
        except UnicodeDecodeError:
            return True
        return False
    return True


def _text(result: RowResult) -> str:
    return base64.b64encode(result.body).decode() if _is_binary(result) else result.body.decode()


def _error(result: RowResult) -> dict[str, Any]:
    return {"status": result.status, "message": result.error}


def _json_line(result: RowResult) -> bytes:
    start = b'{"id":%b,' % json.dumps(result.id, ensure_ascii=False).encode("utf-8", "replace")
    if result.error is not None:
        return b'%b"error":%b}\n' % (start, json.dumps(_error(result), ensure_ascii=False).encode())
    if _is_json(result):
        try:
            value = json.loads(result.body.decode())
        except (ValueError, RecursionError):  # the handler says JSON, and it is none
            pass
        else:
            one_line = (
                result.body
                if b"\n" not in result.body and b"\r" not in result.body
                else json.dumps(value).encode()
            )
            return b'%b"output":%b}\n' % (start, one_line)
    if not _is_binary(result):
        return b'%b"output":%b}\n' % (start, json.dumps(_text(result), ensure_ascii=False).encode())
    more = {"content_type": result.content_type, "output_base64": _text(result)}
    return b"%b%b\n" % (start, json.dumps(more).encode()[1:])


def _csv(rows: Any) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "replace")
