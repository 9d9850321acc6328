"""The rows in the body of a request, and the answers to them in the body of a response."""

from __future__ import annotations

import csv
from email import message_from_bytes
from typing import Any
from urllib.parse import parse_qsl

from pydantic_core import from_json

MAX_PARTS = 1000  # parts or fields of a form
MAX_LINES = 100_000  # lines of CSV


def decode(body: bytes, content_type: str) -> Any:
    """Return a body as a JSON value; images and other binary data are bytes.

    Raises:
        ValueError, csv.Error: The body is not of its content type.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "multipart/form-data":
        if body.count(b"\n--") > MAX_PARTS:
            raise ValueError("the form has too many parts")
        form = message_from_bytes(b"Content-Type: %b\n\n%b" % (content_type.encode(), body))
        return {
            str(part.get_param("name", header="content-disposition")): _text_or_bytes(
                part.get_payload(decode=True)
            )
            for part in form.walk()
            if not part.is_multipart()
        }
    if media_type.startswith("text/"):
        text = body.decode("utf-8", "replace")
        return _table(text) if media_type == "text/csv" else text
    try:
        return from_json(body)  # Clients often leave the type out, or send that of a form.
    except ValueError:
        if media_type.endswith("json"):
            raise
    if media_type.endswith("form-urlencoded"):
        text = body.decode("utf-8", "replace")
        return {name: cell(value) for name, value in parse_qsl(text, max_num_fields=MAX_PARTS)}
    return _text_or_bytes(body)


def cell(text: str) -> str | float | None:
    """Return the value of a cell of CSV or of a form: a number, a text, or None if it is empty."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text or None


def split_request(value: Any) -> list[Any]:
    """Return the rows of a request; a value that is no list of rows is one row."""
    if isinstance(value, dict):
        if isinstance(value.get("instances"), list):
            return list(value["instances"])
        return _rows_of_tensors(value.get("inputs")) or [value]
    is_list = isinstance(value, list) and all(isinstance(row, dict | list) for row in value)
    return value if is_list and value else [value]


def split_answer(value: Any, rows: int) -> list[Any]:
    """Return the answer to each row of a request; answers that fit no rows are None."""
    if isinstance(value, dict):
        if isinstance(value.get("predictions"), list):
            value = value["predictions"]
        elif tensors := _rows_of_tensors(value.get("outputs")):
            value = [next(iter(row.values())) if len(row) == 1 else row for row in tensors]
    if isinstance(value, list) and len(value) == rows:
        return value
    return [value] if rows == 1 else [None] * rows


def _rows_of_tensors(tensors: Any) -> list[dict[str, Any]]:
    """Return an object for each row of tensors of the Open Inference Protocol (V2)."""
    columns = {}
    try:
        for tensor in tensors:
            values = tensor["data"]
            width = len(values) // tensor["shape"][0]
            parts = [values[start : start + width] for start in range(0, len(values), width)]
            columns[str(tensor["name"])] = parts if width > 1 else values
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        return []  # They are no tensors.
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)]


def _table(text: str) -> list[Any]:
    """Return the rows of CSV; a first line without numbers, before others, has the names."""
    if text.count("\n") > MAX_LINES:
        raise ValueError("the CSV has too many lines")
    lines = [line for line in csv.reader(text.splitlines(), skipinitialspace=True) if line]
    names, *rows = [[*map(cell, line)] for line in lines] or [[]]
    if rows and all(isinstance(value, str) for value in names):
        return [dict(zip(lines[0], row, strict=False)) for row in rows]
    return [names, *rows]


def _text_or_bytes(body: Any) -> Any:
    try:
        return cell(body.decode())
    except UnicodeDecodeError:
        return body
