"""The payloads of a benchmark: files, directories, lists of requests, recordings, samples, or
generated data.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tsx_archiver.limits import human
from tsx_cli.bench.load.results import Inputs
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.recordings import SUFFIX, NotARecording, read
from tsx_runtime.shared.content_types import guess_content_type

MOST_BYTES = 1 << 30  # all payloads together: they are held in memory, as they go over the wire
KEYS = ("body", "file", "base64", "content_type", "headers", "query")
BODIES = KEYS[:3]
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
VALUE = re.compile(r"[\t -~\x80-\xff]*")
NOT_SENT = {
    "authorization",
    "connection",
    "content-length",
    "expect",
    "host",
    "te",
    "transfer-encoding",
    "upgrade",
}


class Payload(NamedTuple):
    """One request, whatever the protocol makes of it.

    `at`: seconds after the first one of its recording. `name`: the file it was read from, below the
    directory that was given.
    """

    body: bytes
    content_type: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    query: str = ""
    at: float | None = None
    name: str | None = None


def read_payloads(sources: Sequence[Path], *, content_type: str | None = None) -> list[Payload]:
    """Of files, directories, `.jsonl` lists and recordings, in their order.

    `content_type` is for those that do not say theirs.

    Raises CliError, UsageError.
    """
    if not sources:
        raise UsageError(
            "there is nothing to send: give --input a file, a directory, a .jsonl list of requests"
            " or a recording"
        )
    found: list[Payload] = []
    size = 0
    for source in sources:
        for payload in _of(source, content_type):
            size += len(payload.body)
            if size > MOST_BYTES:
                raise CliError(
                    f"{source}: the inputs are more than {human(MOST_BYTES)} together; give fewer"
                    " of them"
                )
            found.append(payload)
    if not found:
        raise CliError(f"{', '.join(map(str, sources))}: there are no requests in it")
    return found


def mix(payloads: Sequence[Payload], source: str) -> Inputs:
    """What the report says of them."""
    sizes = sorted(len(payload.body) for payload in payloads)
    kinds = Counter(payload.content_type or "none" for payload in payloads)
    return Inputs(
        source=source,
        count=len(payloads),
        content_types=dict(kinds.most_common()),
        smallest=sizes[0],
        median=sizes[len(sizes) // 2],
        largest=sizes[-1],
    )


def _of(source: Path, content_type: str | None, name: str = "") -> Iterator[Payload]:
    if not source.exists():
        raise CliError(f"there is no input '{source}'")
    try:
        if source.is_dir():
            yield from _of_directory(source, content_type)
        elif source.suffix == SUFFIX:
            yield from _of_recording(source)
        elif source.suffix == ".jsonl":
            yield from _of_list(source, content_type)
        else:
            body = _whole(source)
            yield Payload(
                body,
                content_type or guess_content_type(source.name, body),
                name=name or source.name,
            )
    except NotARecording as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"{source} cannot be read: {error.strerror or error}") from error


def _of_directory(source: Path, content_type: str | None) -> Iterator[Payload]:
    files = sorted(
        path for path in source.rglob("*") if path.is_file() and not path.name.startswith(".")
    )
    if any(file.suffix == SUFFIX for file in files):
        yield from _of_recording(source)
        return
    if not files:
        raise CliError(f"{source} contains no file to send")
    for file in files:
        yield from _of(file, content_type, file.relative_to(source).as_posix())


def _of_recording(source: Path) -> Iterator[Payload]:
    first: float | None = None
    for entry in read(source):
        first = entry.at if first is None else first
        kind = next(
            (value for name, value in entry.headers if name.lower() == "content-type"), None
        )
        headers = tuple(
            (name, value)
            for name, value in entry.headers
            if name.lower() not in NOT_SENT | {"content-type"}
        )
        yield Payload(entry.body, kind, headers, entry.query, entry.at - first)


def _of_list(source: Path, content_type: str | None) -> Iterator[Payload]:
    with source.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield of_line(json.loads(line.decode("utf-8-sig")), source.parent, content_type)
            except (ValueError, RecursionError, CliError) as error:
                raise CliError(f"{source}, line {number}: {error}") from error


def of_line(given: Any, directory: Path, content_type: str | None = None) -> Payload:
    """A request of a `.jsonl` list; files are looked for beside it. Raises ValueError, CliError."""
    if not isinstance(given, Mapping):
        raise ValueError('a request is an object, such as {"body": {"x": 1}}')
    if unknown := [key for key in given if key not in KEYS]:
        raise ValueError(f"'{unknown[0]}' is not known; a request has {', '.join(KEYS)}")
    named = [key for key in BODIES if key in given]
    if len(named) != 1:
        raise ValueError(
            f"a request has one of {', '.join(BODIES)}, this one has"
            f" {' and '.join(named) or 'none'}"
        )
    body, guess = _body(named[0], given[named[0]], directory)
    kind, headers, query = (
        given.get("content_type", content_type or guess),
        given.get("headers", {}),
        given.get("query", ""),
    )
    if (
        not isinstance(kind, str | None)
        or not isinstance(query, str)
        or not isinstance(headers, Mapping)
    ):
        raise ValueError("content_type and query are text, and headers an object of them")
    given_headers = tuple((str(name), str(value)) for name, value in headers.items())
    if refused := next(
        (name for name, _ in given_headers if name.lower() in NOT_SENT - {"authorization"}), None
    ):
        raise ValueError(f"the header {refused} is set by the generator itself")
    if any(name.lower() == "content-type" for name, _ in given_headers):
        raise ValueError("give the Content-Type as 'content_type', not in the headers")
    wrong = [
        name
        for name, value in (*given_headers, ("content-type", kind or ""))
        if not is_header(name, value)
    ]
    if wrong:
        raise ValueError(
            f"the header '{wrong[0]}' cannot be sent: a name has no spaces, a value is one line of"
            " Latin-1"
        )
    name = given["file"] if named == ["file"] else None
    return Payload(body, kind, given_headers, query.encode().decode("latin-1"), name=name)


def is_header(name: str, value: str) -> bool:
    """Whether it can go over the wire as it is."""
    return TOKEN.fullmatch(name) is not None and VALUE.fullmatch(value) is not None


def _whole(file: Path) -> bytes:
    """Raises OSError, and CliError for more than can be sent, before it fills the memory."""
    with file.open("rb") as source:
        if (
            os.fstat(source.fileno()).st_size <= MOST_BYTES
            and len(content := source.read(MOST_BYTES + 1)) <= MOST_BYTES
        ):
            return content
    raise CliError(
        f"{file} is larger than {human(MOST_BYTES)}, the limit for one input; give a smaller file"
    )


def _body(key: str, value: Any, directory: Path) -> tuple[bytes, str]:
    if key == "body":
        if isinstance(value, str):
            return value.encode(), "text/plain; charset=utf-8"
        return (
            json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(),
            "application/json",
        )
    if not isinstance(value, str):
        raise ValueError(f"'{key}' is text")
    if key == "base64":
        try:
            return base64.b64decode(value, validate=True), "application/octet-stream"
        except binascii.Error as error:
            raise ValueError(f"'base64' is not base64: {error}") from error
    file = directory / value
    if not file.is_file():
        raise CliError(f"there is no file '{file}'")
    body = _whole(file)
    return body, guess_content_type(file.name, body)
