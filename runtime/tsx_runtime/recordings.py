"""The file format of recordings, and a reader, for workers, the server and the command line.

A file begins with a line of JSON, `{"tsx": "recording", "format": 1, "model": "digits"}`. Each
request is a line of JSON, its body, the body of its answer, and a newline. `body` and `answer.body`
are the sizes of the two in bytes. Without `answer.body` no answer follows:

    {"at": 1763723123.25, "version": "1.0", "query": "", "headers": [["content-type", "image/png"]],
    "body": 3140,
     "answer": {"status": 200, "seconds": 0.0123, "headers": [], "body": 77}, "precision": "bf16"}

`at` is when the request was complete, in seconds of Unix time. Requests lie in the order in which
they were answered. A reader ignores an incomplete request at the end and keys that it does not
know. It refuses another `format`.
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
    """A request, and the parts of its answer that the recording was asked to keep."""

    at: float  # seconds of Unix time
    version: str  # the version that answered
    query: str
    headers: Headers
    body: bytes
    status: int = 0  # status of the answer; 0 if unknown
    seconds: float = 0.0  # time from `at` to the answer
    answer_headers: Headers = ()
    answer: bytes | None = None  # None if not recorded
    model: str = ""  # the name in the head of the file
    precision: str | None = None  # the precision that the version's archive configures


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
    precision = {"precision": entry.precision} if entry.precision else {}
    head = json.dumps(fields | {"answer": answer} | precision).encode()
    return b"%b\n%b%b\n" % (head, entry.body, entry.answer or b"")


def list_files(path: Path) -> list[Path]:
    """Return the recording itself, or the recordings in a directory.

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

    Only the heads of the requests are held in memory.

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
    last: Path | None = None
    opened: BinaryIO | None = None
    try:
        while positions:
            _, file, offset = heapq.heappop(positions)
            if opened is None or file != last:
                if opened is not None:
                    opened.close()
                last, opened = file, file.open("rb")
            opened.seek(offset)
            entry = _read_entry(opened, file)
            if entry is not None:
                yield entry._replace(model=models[file])
    finally:
        if opened is not None:
            opened.close()


def _read_file_head(source: BinaryIO, file: Path) -> dict[str, Any]:
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


def _read_entry(source: BinaryIO, file: Path, *, skip: bool = False) -> Recorded | None:
    """Return the next request, or None at the end and for an incomplete one.

    With `skip` the bodies are skipped.
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
        size, more = int(head["body"]), answer.get("body")
        if size < 0 or int(more or 0) < 0:
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
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotARecording(
            f"{file} is damaged at byte {start}: no request starts there"
        ) from error
    if skip:
        source.seek(size + int(more or 0), 1)
        body = answered = b""
    else:
        body, answered = source.read(size), source.read(int(more or 0))
    if source.read(1) != b"\n":
        return None
    return entry._replace(body=body, answer=None if more is None else answered)
