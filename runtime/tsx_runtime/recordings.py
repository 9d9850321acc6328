"""The file format of recordings, and a reader, for workers, the server and the command line.

A file begins with a line of JSON, `{"tsx": "recording", "format": 1, "model": "digits"}`. Each
request is a line of JSON, as many bytes as its `body` says, as many as its `answer.body` says (none
where it does not), and a newline:

    {"at": 1763723123.25, "version": "1.0", "query": "", "headers": [["content-type", "image/png"]],
    "body": 3140,
     "answer": {"status": 200, "seconds": 0.0123, "headers": [], "body": 77}, "precision": "bf16"}

`at` is when the request was complete, in seconds of Unix time; requests lie in the order in which
they were answered. What a file has at its end of a request that did not come whole is nothing. A
reader passes over keys that it does not know, and refuses another `format`.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

FORMAT = 1
SUFFIX = ".tsxrec"
LONGEST_HEAD = 1 << 20  # bytes of a line

Headers = Sequence[tuple[str, str]]


class NotARecording(ValueError):
    """The file is not a recording, or is damaged; the message says where."""


class Recorded(NamedTuple):
    """One request. Of its answer there is what the recording was asked to keep."""

    at: float  # seconds of Unix time
    version: str  # which answered
    query: str
    headers: Headers
    body: bytes
    status: int = 0  # of its answer; 0 where that is not known
    seconds: float = 0.0  # from `at` to the answer
    answer_headers: Headers = ()
    answer: bytes | None = None  # None where it was not kept
    model: str = ""  # as its file says
    precision: str | None = None  # that the version's archive configures


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


def files_of(place: Path) -> list[Path]:
    """The recording itself, or those of a directory.

    Raises NotARecording where there is none, OSError.
    """
    if not place.is_dir():
        return [place]
    files = sorted(place.rglob(f"*{SUFFIX}"))
    if not files:
        raise NotARecording(f"{place} contains no recording (*{SUFFIX})")
    return files


def read(place: Path) -> Iterator[Recorded]:
    """All requests of a file, or of a directory's files, in the order in which they came.

    Raises NotARecording, OSError.

    Only their heads are held in memory.
    """
    found: list[tuple[float, Path, int]] = []
    models: dict[Path, str] = {}
    for file in files_of(place):
        with file.open("rb") as source:
            models[file] = str(_read_file_head(source, file).get("model", ""))
            while True:
                at = source.tell()
                entry = _read_entry(source, file, skip=True)
                if entry is None:
                    break
                found.append((entry.at, file, at))
    heapq.heapify(found)
    last: Path | None = None
    opened: BinaryIO | None = None
    try:
        while found:
            _, file, at = heapq.heappop(found)
            if opened is None or file != last:
                if opened is not None:
                    opened.close()
                last, opened = file, file.open("rb")
            opened.seek(at)
            entry = _read_entry(opened, file)
            if entry is not None:
                yield entry._replace(model=models[file])
    finally:
        if opened is not None:
            opened.close()


def _read_file_head(source: BinaryIO, file: Path) -> dict[str, Any]:
    try:
        head = json.loads(source.readline(LONGEST_HEAD))
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
    """None at the end, and for what did not come whole. With `skip`, without its bodies."""
    start = source.tell()
    line = source.readline(LONGEST_HEAD)
    if not line.endswith(b"\n"):
        if len(line) == LONGEST_HEAD:
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
