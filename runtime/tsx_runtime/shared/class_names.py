"""The names of a model's classes, read from `index_to_name.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_class_names(path: Path) -> dict[str, str] | None:
    """Read the names of classes, by class number.

    The file holds {"0": name}, {"0": [id, name]} or {"object_type_names": [names]}.

    Returns:
        None if there is no such file.

    Raises:
        ValueError: The file has a different structure.
    """
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if isinstance(data, dict) and isinstance(data.get("object_type_names"), list):
        data = dict(enumerate(data["object_type_names"]))
    if not isinstance(data, dict):
        raise ValueError(
            f'{path.name} holds a {type(data).__name__}; it must map numbers to names, as in {{"0":'
            ' "cat"}'
        )
    return {str(number): _name(number, value, path) for number, value in data.items()}


def _name(number: Any, value: Any, path: Path) -> str:
    if isinstance(value, list) and value:
        value = value[-1]
    if not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise ValueError(
            f"{path.name} gives class {number} a {kind} as its name; it must be text, or a list"
            " that ends with text"
        )
    return str(value)
