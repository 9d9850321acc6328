"""Examples of requests, made from their JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsx_runtime.features.python_files.worker.schemas import resolve

MAX_DEPTH = 8
TEXT = "The quick brown fox jumps over the lazy dog."
# A picture of one pixel, as PNG.
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00",
    "email": "name@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def example_of(root: Mapping[str, Any]) -> Any:
    """Return an example of a JSON schema; None without a schema."""
    return _example(root, root, MAX_DEPTH) if root else None


def _example(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("default", "const"):
        if schema.get(key) is not None:
            return schema[key]
    resolved = resolve(schema, root)
    if resolved is not schema:
        return _example(resolved, root, depth)
    kind = schema.get("type")
    if kind == "object":
        required = schema.get("required", ())
        return {
            name: _example(field, root, depth - 1)
            for name, field in schema.get("properties", {}).items()
            if depth and (name in required or ("default" in field and depth > MAX_DEPTH - 2))
        }
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items", {})] * max(
            schema.get("minItems", 1), 1
        )
        # An object has no fields at depth 0.
        return [_example(item, root, depth - 1) for item in items] if depth > 1 else []
    if kind == "string":
        return _text(schema)
    if kind in ("number", "integer"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        number = least + ("exclusiveMinimum" in schema and "minimum" not in schema)
        number = min(number, schema["maximum"]) if "maximum" in schema else number
        return number if kind == "integer" else float(number)
    return True if kind == "boolean" else None


def _text(schema: Mapping[str, Any]) -> str:
    if "contentEncoding" in schema:
        return PICTURE
    text = _FORMATS.get(schema.get("format", ""), TEXT)
    return text[: schema.get("maxLength", len(text))].ljust(schema.get("minLength", 0), ".")
