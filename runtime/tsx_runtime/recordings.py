"""The file format of recordings, with a writer and a reader, for all parts of tsx.

A file begins with a line of JSON, `{"tsx": "recording", "format": 1, "model": "digits"}`. Each
request consists of a line of JSON, its body, the body of its answer, and a newline. `body` and
`answer.body` are the sizes of these bodies in bytes. Without `answer.body` the file has no answer:

    {"at": 1763723123.25, "version": "1.0", "query": "", "headers": [["content-type", "image/png"]],
    "body": 3140,
     "answer": {"status": 200, "seconds": 0.0123, "headers": [], "body": 77}, "precision": "bf16",
     "id": "77ab6e42e1f0a9d3"}

`at` is the Unix time in seconds at which the request was complete. The file has the requests in the
order in which they were answered. A reader ignores an incomplete request at the end and keys that
it does not know. It refuses another `format`.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

FORMAT = 1
SUFFIX = ".tsxrec"
MAX_HEAD_BYTES = 1 << 20

Headers = Sequence[tuple[str, str]]


class NotARecording(ValueError):
    """A file that is not a recording, or is damaged; the message says where."""


class Recorded(NamedTuple):
    """A request, and the recorded parts of its answer."""

    at: float  # seconds of Unix time
    version: str  # the model version that answered
    query: str
    headers: Headers
    body: bytes
    status: int = 0  # status of the answer; 0 if unknown
    seconds: float = 0.0  # the time from `at` to the answer
    answer_headers: Headers = ()
    answer: bytes | None = None  # None if not recorded
    model: str = ""  # the model's name in the first line of the file
    precision: str | None = None  # the precision that the version's archive configures
    request_id: str = ""  # the id that the answer carried; empty in files of old releases


def file_head(model: str) -> bytes:
    return json.dumps({"tsx": "recording", "format": FORMAT, "model": model}).encode() + b"\n"


def encode(entry: Recorded) -> bytes:
    answer: dict[str, Any] = {"status": entry.status, "seconds": round(entry.seconds, 6)}
    if entry.answer is not None:
        answer |= {"headers": entry.answer_headers, "body": len(entry.answer)}
    fields = {
        "at": round(entry.at, 6),
        "version": entry.version,
        "query": entry.query,
        "headers": entry.headers,
        "body": len(entry.body),
    }
    optional = {"precision": entry.precision, "id": entry.request_id}
    present = {name: value for name, value in optional.items() if value}
    head = json.dumps(fields | {"answer": answer} | present).encode()
    return b"%b\n%b%b\n" % (head, entry.body, entry.answer or b"")


def list_files(path: Path) -> list[Path]:
    """Return the path itself, or the recordings in it if it is a directory.

    Raises:
        NotARecording: The directory contains none.
        OSError: A directory cannot be read.
    """
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob(f"*{SUFFIX}"))
    if not files:
        raise NotARecording(f"{path} contains no recording (*{SUFFIX})")
    return files


def read(path: Path) -> Iterator[Recorded]:
    """Yield all requests of a file, or of a directory's files, in the order in which they came.

    Only the times and positions of the requests are held in memory, not their bodies.

    Raises:
        NotARecording: A file is not a recording, or is damaged.
        OSError: A file cannot be read.
    """
    positions: list[tuple[float, Path, int]] = []
    models: dict[Path, str] = {}
    for file in list_files(path):
        with file.open("rb") as source:
            models[file] = str(_read_file_head(source, file).get("model", ""))
            while True:
                offset = source.tell()
                entry = _read_entry(source, file, skip=True)
                if entry is None:
                    break
                positions.append((entry.at, file, offset))
    heapq.heapify(positions)
    current_file: Path | None = None
    current_source: BinaryIO | None = None
    try:
        while positions:
            _, file, offset = heapq.heappop(positions)
            if current_source is None or file != current_file:
                if current_source is not None:
                    current_source.close()
                current_file, current_source = file, file.open("rb")
            current_source.seek(offset)
            entry = _read_entry(current_source, file)
            if entry is not None:
                yield entry._replace(model=models[file])
    finally:
        if current_source is not None:
            current_source.close()


def read_file(source: BinaryIO, label: str) -> Iterator[Recorded]:
    """Yield the requests of an open file in its order; `label` names it in errors.

    Raises:
        NotARecording: It is not a recording, or is damaged.
        OSError: It cannot be read.
    """
    model = str(_read_file_head(source, label).get("model", ""))
    while (entry := _read_entry(source, label)) is not None:
        yield entry._replace(model=model)


def find_request(
    directory: Path, request_id: str, at: float | None, max_files: int
) -> Recorded | None:
    """Return the request with an id, or None if the files that are read do not have it.

    Args:
        directory: The directory of a recording.
        request_id: The id.
        at: The time of the request: files that were complete before it are not read. None: the
            newest files are read.
        max_files: The number of files that are read.

    Raises:
        NotARecording: There is no recording, or a file is damaged.
        OSError: A file cannot be read.
    """
    files = [file for file in list_files(directory) if file.stat().st_mtime >= (at or 0)]
    for file in files[:max_files] if at is not None else files[-max_files:]:
        with file.open("rb") as source:
            _read_file_head(source, file)
            offset = source.tell()
            while (entry := _read_entry(source, file, skip=True)) is not None:
                if entry.request_id == request_id:
                    source.seek(offset)
                    return _read_entry(source, file)
                offset = source.tell()
    return None


def _read_file_head(source: BinaryIO, file: Path | str) -> dict[str, Any]:
    try:
        head = json.loads(source.readline(MAX_HEAD_BYTES))
        if head["tsx"] != "recording":
            raise ValueError
        if head["format"] != FORMAT:
            raise NotARecording(
                f"{file} is a recording of format {head['format']}; this tsx reads format {FORMAT}"
            )
    except NotARecording:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise NotARecording(f"{file} is not a recording: its first line is invalid") from error
    return dict(head)


def _read_entry(source: BinaryIO, file: Path | str, *, skip: bool = False) -> Recorded | None:
    """Return the next request, or None at the end of the file or before an incomplete request.

    With `skip` the bodies are not read.
    """
    start = source.tell()
    line = source.readline(MAX_HEAD_BYTES)
    if not line.endswith(b"\n"):
        if len(line) == MAX_HEAD_BYTES:
            raise NotARecording(f"{file} is damaged at byte {start}: no request starts there")
        return None
    try:
        head = json.loads(line)
        answer = head.get("answer") or {}
        size, answer_size = int(head["body"]), answer.get("body")
        if size < 0 or int(answer_size or 0) < 0:
            raise ValueError
        entry = Recorded(
            float(head["at"]),
            str(head.get("version", "")),
            str(head.get("query", "")),
            tuple((str(name), str(value)) for name, value in head.get("headers", ())),
            b"",
            int(answer.get("status", 0)),
            float(answer.get("seconds", 0.0)),
            tuple((str(name), str(value)) for name, value in answer.get("headers", ())),
            precision=None if head.get("precision") is None else str(head["precision"]),
            request_id=str(head.get("id", "")),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotARecording(
            f"{file} is damaged at byte {start}: no request starts there"
        ) from error
    if skip:
        source.seek(size + int(answer_size or 0), 1)
        body = answer_body = b""
    else:
        body, answer_body = source.read(size), source.read(int(answer_size or 0))
    if source.read(1) != b"\n":
        return None
    return entry._replace(body=body, answer=None if answer_size is None else answer_body)
