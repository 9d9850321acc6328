"""The rows in the body of a request, and the answers to them in the body of a response."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from email import message_from_bytes
from email.message import Message
from typing import Any
from urllib.parse import parse_qsl


def decode(body: bytes, content_type: str) -> Any:
    """Return a body as a JSON value; images and other binary data are bytes.

    Raises:
        ValueError: The body is not of its content type.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in ("text/csv", "application/csv"):
        return _table(body)
    if media_type == "multipart/form-data":
        message = message_from_bytes(b"Content-Type: %b\n\n%b" % (content_type.encode(), body))
        parts = [part for part in message.walk() if not part.is_multipart()]
        return {str(_name_of(part)): _content(part.get_payload(decode=True)) for part in parts}
    if media_type.endswith("form-urlencoded") and body[:1] not in (b"{", b"["):
        return {name: cell(value) for name, value in parse_qsl(body.decode("utf-8", "replace"))}
    if media_type.startswith("text/"):
        return body.decode("utf-8", "replace")
    try:
        return json.loads(body)  # Clients often leave the type out, or send that of a form.
    except (ValueError, RecursionError) as error:
        if media_type.endswith("json"):
            raise ValueError(f"the JSON cannot be read: {error}") from error
        return _content(body)


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
        if _is_tensors(value.get("inputs")):
            return _rows_of_tensors(value["inputs"])
    if isinstance(value, list) and value and all(isinstance(row, dict | list) for row in value):
        return value
    return [value]


def split_answer(value: Any, rows: int) -> list[Any]:
    """Return the answer to each row of a request; answers that fit no rows are None."""
    if isinstance(value, dict):
        if isinstance(value.get("predictions"), list):
            value = value["predictions"]
        elif _is_tensors(value.get("outputs")):
            tensors = _rows_of_tensors(value["outputs"])
            value = [next(iter(row.values())) if len(row) == 1 else row for row in tensors]
    if isinstance(value, list) and len(value) == rows:
        return value
    return [value] if rows == 1 else [None] * rows


def _is_tensors(value: Any) -> bool:
    """Tell whether a value is the `inputs` or `outputs` of the Open Inference Protocol (V2)."""
    return isinstance(value, list) and all(
        isinstance(item, dict) and {"name", "data", "shape"} <= item.keys() for item in value
    )


def _rows_of_tensors(tensors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an object for each row, with the values of each tensor by its name."""
    rows: list[dict[str, Any]] = []
    for tensor in tensors:
        values, shape = tensor["data"], tensor["shape"]
        count = shape[0] if isinstance(shape, list) and shape else None
        if not (isinstance(values, list) and isinstance(count, int) and 0 < count <= len(values)):
            raise ValueError("a tensor has no data for its shape")
        width = len(values) // count
        rows = rows or [{} for _ in range(count)]
        for index, row in enumerate(rows[:count]):
            part = values[index * width : (index + 1) * width]
            row[str(tensor["name"])] = part[0] if width == 1 else part
    return rows


def _table(body: bytes) -> list[Any]:
    """Return the rows of CSV; a first line without numbers, before others, has the names."""
    try:
        lines = [*csv.reader(body.decode("utf-8", "replace").splitlines(), skipinitialspace=True)]
    except csv.Error as error:
        raise ValueError(f"the CSV cannot be read: {error}") from error
    rows = [[*map(cell, line)] for line in lines if line]
    if len(rows) > 1 and all(isinstance(value, str) for value in rows[0]):
        return [dict(zip(map(str, rows[0]), row, strict=False)) for row in rows[1:]]
    return rows


def _name_of(part: Message) -> Any:
    return part.get_param("name", header="content-disposition")


def _content(body: Any) -> Any:
    """Return bytes as a text if they are one."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body
