"""The inputs of a model: their values by path, and their kinds by a JSON schema or a guess."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tsx_archiver.monitor.config import HEADER_PREFIX, FieldKind
from tsx_runtime.features.monitor.statistics.facts import image_facts

BODY = "body"  # the path of a row that is neither an object nor a short list
MAX_FIELDS = 200
MAX_NODES = 1000  # parts of a schema
MAX_SHORT_LIST = 64  # A longer list of numbers is one field.
MAX_CATEGORY_CHARS = 50  # A longer text is no category.
MAX_CATEGORY_WORDS = 4
ENCODED_STARTS = ("data:image/", "iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # images in base64
SCHEMA_KINDS: dict[Any, FieldKind] = {
    "boolean": "category",
    "integer": "number",
    "number": "number",
}


def value_at(row: Any, path: str, headers: Mapping[str, str] = {}) -> Any:
    """Return the value at a path, such as `customer.age`, `0` or `header:x-country`, or None."""
    if isinstance(row, dict) and path in row:
        return row[path]  # Keys may have dots.
    if path == BODY:
        return row
    if path.startswith(HEADER_PREFIX):
        return headers.get(path.removeprefix(HEADER_PREFIX).lower())
    try:
        for part in path.split("."):
            row = row[int(part) if isinstance(row, list) else part]
    except (LookupError, TypeError, ValueError):
        return None
    return row


def values_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each field of a row."""
    items: Any = ()
    if isinstance(value, dict) and "b64" not in value:
        items = value.items()
    elif isinstance(value, list) and len(value) <= MAX_SHORT_LIST:
        items = () if any(isinstance(item, list | dict) for item in value) else enumerate(value)
    for name, item in items:
        yield from values_of(item, f"{path}.{name}" if path else str(name))
    if not items:
        yield path or BODY, value


def guess_kinds(row: Any, kinds: dict[str, FieldKind]) -> None:
    """Add the kinds of a row's fields to those of other rows.

    Fields of mixed kinds, and those of structures, are ignored.
    """
    for path, value in islice(values_of(row), MAX_FIELDS):
        if value is not None:
            kind = _kind_of(value)
            if (known := kinds.setdefault(path, kind)) != kind:
                kinds[path] = "text" if {known, kind} == {"text", "category"} else "ignore"


def _kind_of(value: Any) -> FieldKind:
    if isinstance(value, bool):
        return "category"
    if isinstance(value, int | float):
        return "number"
    if not isinstance(value, str) or value.startswith(ENCODED_STARTS):
        return "image" if image_facts(value) else "ignore"
    is_short = len(value) <= MAX_CATEGORY_CHARS and len(value.split()) <= MAX_CATEGORY_WORDS
    return "category" if is_short else "text"


def schema_fields(schema: Any) -> dict[str, FieldKind]:
    """Return the kinds of fields that the JSON schema of a request determines.

    Texts without an `enum` are not among them, since they may be categories.
    """
    kinds: dict[str, FieldKind] = {}
    pending = [("", schema)]
    try:
        for path, item in islice(pending, MAX_NODES):  # The list grows meanwhile.
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
