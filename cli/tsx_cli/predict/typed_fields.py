"""JSON bodies made of the fields of `tsx predict`, for models with a signature."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_runtime.features.python_files.worker.schemas import resolve
from tsx_runtime.shared.suggestions import suggestion


def encode_fields(fields: Sequence[str], schema: Mapping[str, Any]) -> bytes | None:
    """Return the JSON object with fields that are given as NAME=VALUE.

    Args:
        fields: The fields.
        schema: The JSON schema of the model's input.

    Returns:
        None if the model takes no JSON object with named fields.

    Raises:
        UsageError: The model has no such field, or a value is missing.
    """
    root, schema = schema, resolve(schema, schema)
    properties: Mapping[str, Any] = schema.get("properties", {})
    if not properties:
        return None
    body: dict[str, Any] = {}
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals:
            raise UsageError(f"--field {name} has no value: give {name}=VALUE")
        if name not in properties and not schema.get("additionalProperties"):
            hint = suggestion(name, properties) or ";"
            raise UsageError(
                f"the model has no field '{name}'{hint} it has {', '.join(properties)}"
            )
        if name in body:
            raise UsageError(f"--field {name} is given twice; a list is one value, {name}='[1, 2]'")
        body[name] = _parse(value, properties.get(name, {}), root)
    return json.dumps(body, ensure_ascii=False).encode()


def _parse(value: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return a value with the type of its schema; the server refuses a text of a wrong type."""
    if _takes_text(schema, root):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _takes_text(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return any(_takes_text(option, root) for option in options)
    schema = resolve(schema, root)
    values = schema.get("enum") or [schema.get("const")]
    return "string" in str(schema.get("type")) or any(isinstance(value, str) for value in values)
