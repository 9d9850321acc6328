"""`index_to_name.json`: maps class numbers to names. Contract section 5.4."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_runtime.worker.exceptions import LoadError


def load_label_mapping(mapping_file_path: str | Path) -> dict[str, str] | None:
    """None where there is no such file. The shapes: {"0": name}, {"0": [id, name]}, {"object_type_names": [names]}."""
    path = Path(mapping_file_path)
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise LoadError(f"{path.name} is not JSON: {error}") from error
    if isinstance(data, dict) and isinstance(data.get("object_type_names"), list):
        data = dict(enumerate(data["object_type_names"]))
    if not isinstance(data, dict):
        raise LoadError(f'{path.name} holds a {type(data).__name__}; it must map numbers to names, as in {{"0": "cat"}}')
    return {str(number): _name(number, value, path) for number, value in data.items()}


def _name(number: Any, value: Any, path: Path) -> str:
    if isinstance(value, list) and value:
        value = value[-1]
    if not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise LoadError(f"{path.name} gives class {number} a {kind} as its name; it must be text, or a list that ends with text")
    return str(value)


def map_class_to_label(
    probs: Sequence[Sequence[float]],
    mapping: Mapping[str, str] | None = None,
    lbl_classes: Sequence[Sequence[int]] | None = None,
) -> list[dict[str, float]]:
    """One dict a row: name (or number, where the mapping has none) -> probability.

    Without `lbl_classes` the rows hold all classes, in order.
    """
    classes = lbl_classes if lbl_classes is not None else [range(len(row)) for row in probs]
    names = mapping or {}
    return [
        {_label(names, number): probability for number, probability in zip(numbers, row, strict=True)}
        for numbers, row in zip(classes, probs, strict=True)
    ]


def _label(names: Mapping[str, Any], number: int) -> str:
    value = names.get(str(number), str(number))
    return str(value[-1]) if isinstance(value, list) and value else str(value)
