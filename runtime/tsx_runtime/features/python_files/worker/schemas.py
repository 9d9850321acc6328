"""References and alternatives in JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_REFERENCES = 100  # the largest number of references that are followed; they may form a cycle


def resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow references, and choose the first of several alternatives that is not null."""
    for _ in range(MAX_REFERENCES):
        alternatives = [
            alternative
            for alternative in schema.get("anyOf", schema.get("oneOf", ()))
            if alternative.get("type") != "null"
        ]
        if "$ref" in schema:
            schema = root.get("$defs", {}).get(schema["$ref"].rpartition("/")[2], {})
        elif alternatives:
            schema = alternatives[0]
        else:
            break
    return schema
