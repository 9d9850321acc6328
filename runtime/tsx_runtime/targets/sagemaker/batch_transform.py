"""A body of many lines, as a batch transform job sends them, and an answer of as many: pure functions.

Two forms, told by their content types: JSON lines, and CSV. A line is a request of its own; its answer is one line again, in the form
that the client accepts, or else that of the request.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Form(NamedTuple):
    media_type: bytes  # of the whole
    item: bytes  # the type of one line


JSON_LINES = Form(b"application/jsonlines", b"application/json")
CSV = Form(b"text/csv", b"text/csv")
FORMS = {
    "application/jsonlines": JSON_LINES,
    "application/x-jsonlines": JSON_LINES,
    "application/jsonl": JSON_LINES,
    "application/x-ndjson": JSON_LINES,
    "text/csv": CSV,
}
_SOMETHING = re.compile(rb"\S")
MOST_ACCEPTED = 100  # types that an Accept header may name; the others count for nothing
ACCEPTED = {**FORMS, "application/json": JSON_LINES}


def form_of(content_type: bytes) -> Form | None:
    return FORMS.get(content_type.partition(b";")[0].strip().lower().decode("latin-1"))


def accepted_form(accept: bytes, own: Form) -> Form:
    """The first that is accepted, in the client's order; the request's own where it accepts anything, or nothing that there is."""
    for part in accept.decode("latin-1").split(",", MOST_ACCEPTED)[:MOST_ACCEPTED]:
        form = ACCEPTED.get(part.partition(";")[0].strip().lower())
        if form is not None:
            return form
    return own


def lines_of(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Those that hold anything, with their numbers, from 1. Each is found when it is asked for: a body may have millions."""
    start, number = 0, 1
    while (found := _SOMETHING.search(body, start)) is not None:
        number += body.count(b"\n", start, found.start())
        begin = max(start, body.rfind(b"\n", start, found.start()) + 1)
        end = body.find(b"\n", begin)
        end = len(body) if end < 0 else end
        yield number, body[begin:end].rstrip(b"\r")
        start, number = end + 1, number + 1


def as_line(answer: bytes, form: Form) -> bytes:
    """An answer as one line. Raises ValueError for one that is no text."""
    text = answer.decode("utf-8")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text.rstrip("\r\n")
        if form is CSV and "\n" not in value:
            return value.encode()  # it is CSV already, for all that anybody knows
    if form is JSON_LINES:
        return _json(value).encode("utf-8", "backslashreplace")  # half of a pair, which JSON can say and UTF-8 cannot
    return _row(value if isinstance(value, list) else [value]).encode("utf-8", "backslashreplace")


def joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def _row(values: list[Any]) -> str:
    """Numbers and texts as they are, anything else as JSON in one field."""
    file = io.StringIO()
    csv.writer(file, lineterminator="").writerow([value if isinstance(value, str) else _json(value) for value in values])
    return file.getvalue().replace("\r", " ").replace("\n", " ")  # of a quoted field: a line is a record
