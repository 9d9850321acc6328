"""The difference between two answers; the caller names the answers in the sentence."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

LONGEST = 60  # characters of a value that a sentence quotes
_WHOLE = {
    "status": "status",
    "content-type": "content type",
    "body": "body",
    "labels": "top labels",
}  # where there is no path


class Difference(NamedTuple):
    """`expected` and `actual` are excerpts for people, `path` the names and indices that lead to
    the field that differs.
    """

    kind: Literal[
        "status",
        "content-type",
        "body",
        "value",
        "presence",
        "length",
        "key order",
        "labels",
        "plugin",
    ]
    path: tuple[str, ...] = ()
    expected: str = ""
    actual: str = ""
    detail: str = ""

    def between(self, expected: str, actual: str) -> str:
        """One sentence; the arguments say whose answers were compared."""
        if self.kind == "plugin":
            return self.detail
        place = ".".join(self.path) or _WHOLE.get(self.kind, "the answer")
        text = f"{place}: {self.expected} ({expected}), {self.actual} ({actual})"
        return f"{text}; {self.detail}" if self.detail else text


def excerpt(value: Any) -> str:
    """A JSON value, or bytes, on one short line."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = (
        " ".join(value.decode("utf-8", "replace").split())
        if isinstance(value, bytes)
        else json.dumps(value, ensure_ascii=False)
    )
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
