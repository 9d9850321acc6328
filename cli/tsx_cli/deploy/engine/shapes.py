"""Shapes: templates of a platform's inputs, written in YAML with `$name` for a value."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def read_shapes(file: Path) -> dict[str, Any]:
    """Return the shapes of a file by their names."""
    content: dict[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return content


def fill(shape: Any, values: Mapping[str, Any]) -> Any:
    """Fill a shape with values, and leave out keys and items whose value is None."""
    if isinstance(shape, str) and shape.startswith("$"):
        return values[shape[1:]]
    if isinstance(shape, dict):
        return without_none({key: fill(item, values) for key, item in shape.items()})
    if isinstance(shape, list):
        return [value for item in shape if (value := fill(item, values)) is not None]
    return shape


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out values that are None."""
    return {key: value for key, value in values.items() if value is not None}
