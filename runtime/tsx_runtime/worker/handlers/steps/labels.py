"""The names of classes, from `index_to_name.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_runtime.shared.class_names import read_class_names
from tsx_runtime.worker.exceptions import LoadError


def load_label_mapping(mapping_file_path: str | Path) -> dict[str, str] | None:
    """Return the names by number, or None without such a file.

    Raises:
        LoadError: The file cannot be used.
    """
    try:
        return read_class_names(Path(mapping_file_path))
    except ValueError as error:
        raise LoadError(str(error)) from error


def map_class_to_label(
    probs: Sequence[Sequence[float]],
    mapping: Mapping[str, str] | None = None,
    lbl_classes: Sequence[Sequence[int]] | None = None,
) -> list[dict[str, float]]:
    """Return a dict from class names to probabilities for each row.

    Args:
        probs: The probabilities, rows first.
        mapping: The names by number. A class without a name has its number as str.
        lbl_classes: The numbers of the classes in each row. Without it, a row holds all classes.
    """
    classes = lbl_classes if lbl_classes is not None else [range(len(row)) for row in probs]
    names = mapping or {}
    return [
        {
            _label(names, number): probability
            for number, probability in zip(numbers, row, strict=True)
        }
        for numbers, row in zip(classes, probs, strict=True)
    ]


def _label(names: Mapping[str, Any], number: int) -> str:
    value = names.get(str(number), str(number))
    return str(value[-1]) if isinstance(value, list) and value else str(value)
