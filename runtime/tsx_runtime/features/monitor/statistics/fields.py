"""The inputs of a model: their values by path, and their kinds by a JSON schema or a guess."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tsx_archiver.monitor.config import FieldKind
from tsx_runtime.features.monitor.statistics.facts import image_facts

BODY = "body"  # the path of a row that is neither an object nor a short list
MAX_FIELDS = 200
MAX_VALUES = 10_000  # of a row or of a schema
MAX_DEPTH = 5
MAX_SHORT_LIST = 64  # A longer list of numbers is one field.
MAX_GUESSED_CATEGORY_CHARS = 50
MAX_GUESSED_CATEGORIES = 20
ENCODED_STARTS = ("data:image/", "iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # images in base64


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
    prefix = f"{path}." if path else ""
    if isinstance(value, dict) and value and depth < MAX_DEPTH and "b64" not in value:
        for name, item in value.items():
            yield from values_of(item, f"{prefix}{name}", depth + 1)
    elif isinstance(value, list) and len(value) <= MAX_SHORT_LIST and not _is_nested(value):
        for index, item in enumerate(value):
            yield f"{prefix}{index}", item
    else:
        yield path or BODY, value


def _is_nested(values: list[Any]) -> bool:
    return any(isinstance(value, list | dict) for value in values)


class FieldGuess:
    """The kinds of fields by the values of the first rows."""

    def __init__(self) -> None:
        self.rows = 0
        self.omitted = 0  # fields after the first MAX_FIELDS
        self._kinds: dict[str, set[FieldKind]] = {}
        self._texts: dict[str, set[str]] = {}

    def add(self, row: Any) -> None:
        self.rows += 1
        values = list(islice(values_of(row), MAX_VALUES))
        self.omitted = max(self.omitted, len(values) - MAX_FIELDS)
        for path, value in values[:MAX_FIELDS]:
            if path in self._kinds or len(self._kinds) < MAX_FIELDS:
                if (kind := _kind_of(value)) is not None:
                    self._kinds.setdefault(path, set()).add(kind)
                if kind == "category":
                    self._texts.setdefault(path, set()).add(str(value))

    def kinds(self) -> dict[str, FieldKind]:
        """Return the kinds; fields of mixed kinds, and those of structures, are ignored."""
        guess: dict[str, FieldKind] = {}
        for path, kinds in self._kinds.items():
            distinct = len(self._texts.get(path, ()))
            if kinds == {"text", "category"} or distinct > max(
                MAX_GUESSED_CATEGORIES, self.rows / 2
            ):
                kinds = {"text"}
            guess[path] = kinds.pop() if len(kinds) == 1 else "ignore"
        return guess


def _kind_of(value: Any) -> FieldKind | None:
    if isinstance(value, str):
        if value.startswith(ENCODED_STARTS):
            return "image"
        is_long = len(value) > MAX_GUESSED_CATEGORY_CHARS or value.count(" ") >= 4
        return "text" if is_long else "category"
    if isinstance(value, bool):
        return "category"
    if value is None or isinstance(value, int | float):
        return None if value is None else "number"
    return "image" if image_facts(value) else "ignore"


def schema_fields(schema: Mapping[str, Any]) -> dict[str, FieldKind]:
    """Return the kinds of fields that the JSON schema of a request determines.

    Texts without an `enum` are not among them, since they may be categories.
    """
    kinds: dict[str, FieldKind] = {}
    pending: list[tuple[str, Any]] = [("", schema)]
    for path, node in islice(pending, MAX_VALUES):  # The list grows meanwhile.
        if not isinstance(node, dict) or len(path) > MAX_FIELDS:
            continue
        if "enum" in node or node.get("type") == "boolean":
            kinds[path] = "category"
        elif node.get("type") in ("number", "integer"):
            kinds[path] = "number"
        definitions = schema.get("$defs")
        if "$ref" in node and isinstance(definitions, dict):
            pending.append((path, definitions.get(str(node["$ref"]).rpartition("/")[2])))
        for key in ("anyOf", "oneOf"):
            if isinstance(node.get(key), list):
                pending += [(path, item) for item in node[key]]
        if not path:  # a list of rows
            pending.append((path, node.get("items")))
        if isinstance(properties := node.get("properties"), dict):
            pending += [
                ("" if name == "instances" else f"{path}.{name}" if path else name, item)
                for name, item in properties.items()
            ]
    return {path: kind for path, kind in islice(kinds.items(), MAX_FIELDS) if path}
