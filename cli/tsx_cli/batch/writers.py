"""The writers of an output: JSON lines, CSV, Parquet, or one file per row."""

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

_NAMES = "names.json"  # the number of the last part, and the names of its files
COLUMNS = ("id", "status", "output", "error")


class Writer(Protocol):
    """A writer of results. Its methods raise OSError and CliError."""

    fingerprint: str  # The journal refuses to continue if this text has changed.

    def write(self, part: int, results: Sequence[RowResult]) -> None:
        """Write a part durably; parts begin at 1.

        The last part may be written again. It then begins with the same rows, and replaces the
        earlier version.
        """

    def finish(self, parts: int) -> None:
        """Complete the output after all parts; the method may be called again."""


class FileWriter:
    """A writer of one file, which is joined from its parts at the end."""

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
    """A writer to standard output."""

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
    """A writer of one file per row, named after the row's id.

    If ids may repeat, the files are `numbered`.
    """

    def __init__(self, store: OutputStore, *, numbered: bool) -> None:
        self._store, self._numbered, self.fingerprint = store, numbered, "directory"

    def write(self, part: int, results: Sequence[RowResult]) -> None:
        """Record the names of a part's files, then write the files.

        If the part is written again, its earlier files are removed first: a row's new file may have
        another name.
        """
        files = dict(map(self._file, results))
        last_part, names = json.loads(self._store.read(_NAMES) or b"[0, []]")
        if last_part == part:
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
    """A line {"id": ..., "output": ...} per row.

    JSON is unchanged, and text becomes a string. Other bytes become `output_base64`, with their
    `content_type`.
    """

    name = "jsonl"

    def encode(self, results: Sequence[RowResult]) -> bytes:
        return b"".join(map(_json_line, results))

    def join(self, parts: Iterator[bytes], file: BinaryIO) -> None:
        file.writelines(parts)


class CsvEncoding:
    """A table with the header COLUMNS. JSON is written as text, and other bytes as base64."""

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
    """A table of COLUMNS and the content type; binary responses are in `output_bytes`.

    A part is a Parquet file, and becomes one or more row groups of the output.
    """

    name = "parquet"

    def __init__(self) -> None:
        """Import pyarrow.

        Raises:
            CliError: The extra is missing.
        """
        self._parquet = pyarrow_parquet()

    def encode(self, results: Sequence[RowResult]) -> bytes:
        import pyarrow as pa

        columns: list[list[Any]] = [[], [], [], [], [], []]
        for result in results:
            text = None if result.error is not None or _is_binary(result) else _text(result)
            data = result.body if result.error is None and text is None else None
            for column, value in zip(
                columns,
                (result.id, result.status, text, data, result.content_type, result.error),
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
    line_start = b'{"id":%b,' % json.dumps(result.id, ensure_ascii=False).encode("utf-8", "replace")
    if result.error is not None:
        return b'%b"error":%b}\n' % (
            line_start,
            json.dumps(_error(result), ensure_ascii=False).encode(),
        )
    if _is_json(result):
        try:
            value = json.loads(result.body.decode())
        except (ValueError, RecursionError):  # The handler's JSON is invalid.
            pass
        else:
            one_line = (
                result.body
                if b"\n" not in result.body and b"\r" not in result.body
                else json.dumps(value).encode()
            )
            return b'%b"output":%b}\n' % (line_start, one_line)
    if not _is_binary(result):
        return b'%b"output":%b}\n' % (
            line_start,
            json.dumps(_text(result), ensure_ascii=False).encode(),
        )
    binary = {"content_type": result.content_type, "output_base64": _text(result)}
    return b"%b%b\n" % (line_start, json.dumps(binary).encode()[1:])


def _csv(rows: Any) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "replace")
