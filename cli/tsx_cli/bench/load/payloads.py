"""The payloads of a benchmark, read from files, directories, lists of requests and recordings."""

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
from tsx_cli.common.output import plain
from tsx_runtime.recordings import SUFFIX, NotARecording, read
from tsx_runtime.shared.content_types import guess_content_type

MAX_PAYLOAD_BYTES = 1 << 30  # limit of all payloads together, which stay in memory
REQUEST_KEYS = ("body", "file", "base64", "content_type", "headers", "query")
BODY_KEYS = REQUEST_KEYS[:3]
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE = re.compile(r"[\t -~\x80-\xff]*")
UNSENT_HEADERS = {
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
    """One request, independent of the protocol.

    `at` is its time in the recording, in seconds after the first request. `name` is the path of its
    file relative to the given directory.
    """

    body: bytes
    content_type: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    query: str = ""
    at: float | None = None
    name: str | None = None


def read_payloads(sources: Sequence[Path], *, content_type: str | None = None) -> list[Payload]:
    """Return the payloads of files, directories, `.jsonl` lists and recordings, in this order.

    `content_type` applies to inputs that do not have their own.

    Raises:
        CliError: An input cannot be read, or all together are too large.
        UsageError: There are no sources.
    """
    if not sources:
        raise UsageError(
            "there is nothing to send: give --input a file, a directory, a .jsonl list of requests"
            " or a recording"
        )
    payloads: list[Payload] = []
    size = 0
    for source in sources:
        for payload in _read(source, content_type):
            size += len(payload.body)
            if size > MAX_PAYLOAD_BYTES:
                raise CliError(
                    f"{source}: the inputs are more than {human(MAX_PAYLOAD_BYTES)} together; give"
                    " fewer of them"
                )
            payloads.append(payload)
    if not payloads:
        raise CliError(f"{', '.join(map(str, sources))}: there are no requests in it")
    return payloads


def mix(payloads: Sequence[Payload], source: str) -> Inputs:
    """Summarize payloads for reports."""
    sizes = sorted(len(payload.body) for payload in payloads)
    kinds = Counter(payload.content_type or "none" for payload in payloads)
    return Inputs(
        source=plain(source),
        count=len(payloads),
        content_types=dict(kinds.most_common()),
        smallest=sizes[0],
        median=sizes[len(sizes) // 2],
        largest=sizes[-1],
    )


def _read(source: Path, content_type: str | None, name: str = "") -> Iterator[Payload]:
    if not source.exists():
        raise CliError(f"there is no input '{source}'")
    try:
        if source.is_dir():
            yield from _read_directory(source, content_type)
        elif source.suffix == SUFFIX:
            yield from _read_recording(source)
        elif source.suffix == ".jsonl":
            yield from _read_list(source, content_type)
        else:
            body = _read_limited(source)
            yield Payload(
                body,
                content_type or guess_content_type(source.name, body),
                name=name or source.name,
            )
    except NotARecording as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"{source} cannot be read: {error.strerror or error}") from error


def _read_directory(source: Path, content_type: str | None) -> Iterator[Payload]:
    files = sorted(
        path for path in source.rglob("*") if path.is_file() and not path.name.startswith(".")
    )
    if any(file.suffix == SUFFIX for file in files):
        yield from _read_recording(source)
        return
    if not files:
        raise CliError(f"{source} contains no file to send")
    for file in files:
        yield from _read(file, content_type, file.relative_to(source).as_posix())


def _read_recording(source: Path) -> Iterator[Payload]:
    first_time: float | None = None
    for entry in read(source):
        first_time = entry.at if first_time is None else first_time
        kind = next(
            (value for name, value in entry.headers if name.lower() == "content-type"), None
        )
        headers = tuple(
            (name, value)
            for name, value in entry.headers
            if name.lower() not in UNSENT_HEADERS | {"content-type"}
        )
        yield Payload(entry.body, kind, headers, entry.query, entry.at - first_time)


def _read_list(source: Path, content_type: str | None) -> Iterator[Payload]:
    with source.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield parse_request(
                    json.loads(line.decode("utf-8-sig")), source.parent, content_type
                )
            except (ValueError, RecursionError, CliError) as error:
                raise CliError(f"{source}, line {number}: {error}") from error


def parse_request(request: Any, directory: Path, content_type: str | None = None) -> Payload:
    """Return the payload of a line in a `.jsonl` list; file names are relative to `directory`.

    Raises:
        ValueError: The line is not a request.
        CliError: Its file cannot be read.
    """
    if not isinstance(request, Mapping):
        raise ValueError('a request is an object, such as {"body": {"x": 1}}')
    if unknown := [key for key in request if key not in REQUEST_KEYS]:
        raise ValueError(f"'{unknown[0]}' is not known; a request has {', '.join(REQUEST_KEYS)}")
    body_keys = [key for key in BODY_KEYS if key in request]
    if len(body_keys) != 1:
        raise ValueError(
            f"a request has one of {', '.join(BODY_KEYS)}, this one has"
            f" {' and '.join(body_keys) or 'none'}"
        )
    body, guess = _body(body_keys[0], request[body_keys[0]], directory)
    kind = request.get("content_type", content_type or guess)
    headers = request.get("headers", {})
    query = request.get("query", "")
    if (
        not isinstance(kind, str | None)
        or not isinstance(query, str)
        or not isinstance(headers, Mapping)
    ):
        raise ValueError("content_type and query are text, and headers an object of them")
    header_pairs = tuple((str(name), str(value)) for name, value in headers.items())
    if forbidden_header := next(
        (name for name, _ in header_pairs if name.lower() in UNSENT_HEADERS - {"authorization"}),
        None,
    ):
        raise ValueError(f"the header {forbidden_header} is set by the generator itself")
    if any(name.lower() == "content-type" for name, _ in header_pairs):
        raise ValueError("give the Content-Type as 'content_type', not in the headers")
    invalid = [
        name
        for name, value in (*header_pairs, ("content-type", kind or ""))
        if not is_header(name, value)
    ]
    if invalid:
        raise ValueError(
            f"the header '{invalid[0]}' cannot be sent: a name has no spaces, a value is one line"
            " of Latin-1"
        )
    name = request["file"] if body_keys == ["file"] else None
    return Payload(body, kind, header_pairs, query.encode().decode("latin-1"), name=name)


def is_header(name: str, value: str) -> bool:
    """Tell whether a header can be sent unchanged."""
    return HEADER_NAME.fullmatch(name) is not None and HEADER_VALUE.fullmatch(value) is not None


def _read_limited(file: Path) -> bytes:
    """Read a file, unless it is larger than the limit of all payloads.

    Raises:
        OSError: The file cannot be read.
        CliError: The file is too large.
    """
    with file.open("rb") as source:
        if (
            os.fstat(source.fileno()).st_size <= MAX_PAYLOAD_BYTES
            and len(content := source.read(MAX_PAYLOAD_BYTES + 1)) <= MAX_PAYLOAD_BYTES
        ):
            return content
    raise CliError(
        f"{file} is larger than {human(MAX_PAYLOAD_BYTES)}, the limit for one input; give a"
        " smaller file"
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
    body = _read_limited(file)
    return body, guess_content_type(file.name, body)
