"""The difference between two responses, and its description as a sentence."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

MAX_EXCERPT_CHARS = 60
# Names for kinds of differences that have no path.
_NAME_BY_KIND = {
    "status": "status",
    "content-type": "content type",
    "body": "body",
    "labels": "top labels",
}


class Difference(NamedTuple):
    """The first difference: the path of its field in keys and indices, and both values."""

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
        """Return the difference as a sentence, with these names for the two responses."""
        if self.kind == "plugin":
            return self.detail
        field = ".".join(self.path) or _NAME_BY_KIND.get(self.kind, "the answer")
        text = f"{field}: {self.expected} ({expected}), {self.actual} ({actual})"
        return f"{text}; {self.detail}" if self.detail else text


def excerpt(value: Any) -> str:
    """Return a JSON value, or bytes, as one short line."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = (
        " ".join(value.decode("utf-8", "replace").split())
        if isinstance(value, bytes)
        else json.dumps(value, ensure_ascii=False)
    )
    return text if len(text) <= MAX_EXCERPT_CHARS else f"{text[:MAX_EXCERPT_CHARS]}..."


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
