"""The inputs of a model: their values by path, and their kinds by a JSON schema or a guess."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from tsx_archiver.monitor.config import FieldKind
from tsx_runtime.features.monitor.statistics.facts import image_facts

BODY = "body"  # the path of a row that is neither an object nor a short list
MAX_VALUES = 1000  # values of a row, or parts of a schema
MAX_DEPTH = 5
MAX_SHORT_LIST = 64  # A longer list of numbers is one field.
MAX_CATEGORY_CHARS = 50  # A longer text is no category.
MIN_WORDS = 5  # A text with as many is no category.
ENCODED_STARTS = ("data:image/", "iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # images in base64
SCHEMA_KINDS: dict[Any, FieldKind] = {
    "boolean": "category",
    "integer": "number",
    "number": "number",
}


def value_at(row: Any, path: str) -> Any:
    """Return the value at a path such as `customer.age` or `0`; None if there is none."""
    if isinstance(row, dict) and path in row:
        return row[path]  # Keys may have dots.
    if path == BODY:
        return row
    for part in path.split("."):
        if isinstance(row, dict):
            row = row.get(part)
        elif isinstance(row, list) and part.isdecimal():
            row = next(iter(row[int(part[:9]) :]), None)
        else:
            return None
    return row


def values_of(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each field of a row."""
    items: Any = ()
    if isinstance(value, dict) and depth < MAX_DEPTH and "b64" not in value:
        items = value.items()
    elif isinstance(value, list) and len(value) <= MAX_SHORT_LIST:
        items = () if any(isinstance(item, list | dict) for item in value) else enumerate(value)
    for name, item in items:
        yield from values_of(item, f"{path}.{name}" if path else str(name), depth + 1)
    if not items:
        yield path or BODY, value


class FieldGuess:
    """The kinds of fields by the values of the first rows."""

    def __init__(self) -> None:
        self.rows = 0
        self._kinds: dict[str, set[FieldKind]] = {}

    def add(self, row: Any) -> None:
        self.rows += 1
        for path, value in islice(values_of(row), MAX_VALUES):
            if value is not None:
                self._kinds.setdefault(path, set()).add(_kind_of(value))

    def kinds(self) -> dict[str, FieldKind]:
        """Return the kinds; fields of mixed kinds, and those of structures, are ignored."""
        return {
            path: "text"
            if kinds == {"text", "category"}
            else min(kinds)
            if len(kinds) == 1
            else "ignore"
            for path, kinds in self._kinds.items()
        }


def _kind_of(value: Any) -> FieldKind:
    if isinstance(value, bool):
        return "category"
    if isinstance(value, int | float):
        return "number"
    if not isinstance(value, str) or value.startswith(ENCODED_STARTS):
        return "image" if image_facts(value) else "ignore"
    is_long = len(value) > MAX_CATEGORY_CHARS or len(value.split(maxsplit=MIN_WORDS)) >= MIN_WORDS
    return "text" if is_long else "category"


def schema_fields(schema: Any) -> dict[str, FieldKind]:
    """Return the kinds of fields that the JSON schema of a request determines.

    Texts without an `enum` are not among them, since they may be categories.
    """
    kinds: dict[str, FieldKind] = {}
    pending = [("", schema)]
    try:
        for path, item in islice(pending, MAX_VALUES):  # The list grows meanwhile.
            node = schema["$defs"][item["$ref"].rpartition("/")[2]] if "$ref" in item else item
            if kind := "category" if "enum" in node else SCHEMA_KINDS.get(node.get("type")):
                kinds[path] = kind
            pending += [(path, option) for option in node.get("anyOf", ())]
            if not path and "items" in node:  # a list of rows
                pending.append((path, node["items"]))
            for name, value in node.get("properties", {}).items():
                pending.append((f"{path}.{name}" if path else name, value))
    except (AttributeError, LookupError, TypeError):
        return {}  # The handler's schema is no JSON schema.
    return kinds
