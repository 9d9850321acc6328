"""Shapes: what a platform is given, written in YAML with `$name` where a value stands."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def shapes(file: Path) -> dict[str, Any]:
    """The shapes of a file by their names."""
    found: dict[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return found


def filled(shape: Any, values: Mapping[str, Any]) -> Any:
    """The shape with its values; a key or an item whose value is None is left out."""
    if isinstance(shape, str) and shape.startswith("$"):
        return values[shape[1:]]
    if isinstance(shape, dict):
        return some({key: filled(part, values) for key, part in shape.items()})
    if isinstance(shape, list):
        return [value for part in shape if (value := filled(part, values)) is not None]
    return shape


def some(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are None."""
    return {key: value for key, value in values.items() if value is not None}
