"""The line format of `tsx batch` for batch transform jobs: a row is a body and further fields.

Requests and answers have this format. An answer contains its status. A row that fails therefore has
an answer too, and the job continues.
"""

from __future__ import annotations

import base64
import json
from typing import Any

TYPE = "application/vnd.tsx.rows"


def as_line(body: bytes, **fields: Any) -> bytes:
    """Return a row as JSON without a newline."""
    try:
        content = {"text": body.decode()}
    except UnicodeDecodeError:
        content = {"base64": base64.b64encode(body).decode()}
    return json.dumps({**fields, **content}).encode()


def from_line(line: bytes) -> tuple[bytes, dict[str, Any]]:
    """Return the body and the fields of a row.

    Raises:
        ValueError: The line is not a row.
    """
    try:
        fields = json.loads(line)
        body = (
            fields.pop("text").encode()
            if "text" in fields
            else base64.b64decode(fields.pop("base64"), validate=True)
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no row of tsx batch ({error!r})") from error
    return body, fields
