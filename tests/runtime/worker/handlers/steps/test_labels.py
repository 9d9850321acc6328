"""Names of classes from `index_to_name.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handlers.steps.labels import load_label_mapping, map_class_to_label


@pytest.mark.parametrize(
    ("content", "mapping"),
    [
        ({"0": "cat", "1": "dog"}, {"0": "cat", "1": "dog"}),
        ({"0": ["n01440764", "tench"]}, {"0": "tench"}),
        ({"object_type_names": ["cat", "dog"]}, {"0": "cat", "1": "dog"}),
        ({"0": 7}, {"0": "7"}),
    ],
)
def test_every_structure_of_the_file_is_understood(
    tmp_path: Path, content: Any, mapping: dict[str, str]
) -> None:
    path = tmp_path / "index_to_name.json"
    path.write_text(json.dumps(content))
    assert load_label_mapping(path) == mapping


def test_without_the_file_there_is_no_mapping(tmp_path: Path) -> None:
    assert load_label_mapping(str(tmp_path / "index_to_name.json")) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a list"),
        ('{"0": null}', "class 0 a NoneType as its name"),
        ('{"0": []}', "class 0"),
    ],
)
def test_the_error_explains_an_invalid_file(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "index_to_name.json"
    path.write_text(content)
    with pytest.raises(LoadError, match=message):
        load_label_mapping(path)


def test_probabilities_get_the_names_of_their_classes() -> None:
    assert map_class_to_label([[0.9, 0.1]], {"0": "cat", "5": ["id", "dog"]}, [[5, 0]]) == [
        {"dog": 0.9, "cat": 0.1}
    ]


def test_classes_without_a_name_get_their_number() -> None:
    assert map_class_to_label([[0.9, 0.1], [0.2, 0.8]]) == [
        {"0": 0.9, "1": 0.1},
        {"0": 0.2, "1": 0.8},
    ]
    assert map_class_to_label([[0.9, 0.1]], {"0": "cat"}) == [{"cat": 0.9, "1": 0.1}]
