"""Labels of inputs, by name or in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tsx_cli.bench.load.payloads import Payload, read_payloads
from tsx_cli.common.failure import CliError
from tsx_cli.optimize.guard.labels import read_labels, with_names
from tsx_runtime.plugins import ComparedAnswer

NAMED = [Payload(b"1", name="cats/1.png"), Payload(b"2", name="dogs/2.png")]
LINES = [{"file": "dogs/2.png", "label": "dog"}, {"file": "cats/1.png", "label": "cat"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps({"dogs/2.png": "dog", "1.png": "cat"})),
        ("a.jsonl", "\n".join(map(json.dumps, LINES))),
        ("a.csv", "file,label\ncats/1.png,cat\n\n2.png , dog\n"),
        ("a.csv", "cats/1.png,cat\n2.png,dog\n"),
        ("a.jsonl", '"cat"\n"dog"\n'),
    ],
)
def test_labels_are_matched_by_name_or_order(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_labels(tmp_path / name, NAMED) == ["cat", "dog"]


def test_files_of_a_directory_are_labelled_by_name(tmp_path: Path) -> None:
    (tmp_path / "in" / "cats").mkdir(parents=True)
    (tmp_path / "in" / "cats" / "1.txt").write_text("one")
    (tmp_path / "labels.json").write_text('{"cats/1.txt": [1, 2]}')
    assert read_labels(tmp_path / "labels.json", read_payloads([tmp_path / "in"])) == [[1, 2]]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.json", '{"1.png": "cat"}', "no label for 1 of 2 requests, such as 'dogs/2.png'"),
        ("a.json", '{"x.png": "cat"}', "it names 'x.png', and a request is 'cats/1.png'"),
        ("a.json", "[1, 2]", "it is not a JSON object"),
        ("a.json", "{", "Expecting property name"),
        ("a.jsonl", "1\n2\n3", "3 labels in order for 2 requests"),
        ("a.jsonl", json.dumps(LINES[0]) + "\n3", "some lines have a file"),
        ("a.csv", "a,b,c", "'a,b,c' is not a file and a label"),
        ("a.csv", "1.png,cat\n1.png,dog", "a file has two labels"),
        ("a.txt", "", "'.txt' is not known"),
    ],
)
def test_mismatched_labels_are_refused(tmp_path: Path, name: str, text: str, reason: str) -> None:
    refuse(tmp_path / name, text, NAMED, reason)


@pytest.mark.parametrize(
    ("payloads", "reason"),
    [
        ([Payload(b"1")], "the requests have no file names"),
        ([Payload(b"", name=f"{name}/1.png") for name in "ab"], "no label for any request"),
    ],
)
def test_ambiguous_names_are_refused(tmp_path: Path, payloads: list[Payload], reason: str) -> None:
    refuse(tmp_path / "a.json", '{"1.png": 3}', payloads, reason)


def refuse(file: Path, text: str, payloads: list[Payload], reason: str) -> None:
    file.write_text(text)
    with pytest.raises(CliError, match=reason):
        read_labels(file, payloads)


def test_a_missing_label_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot be read: No such file"):
        read_labels(tmp_path / "a.json", NAMED)


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        ({"cat": 0.9, "dog": 0.1}, 1, "dog"),
        ({"cat": 0.9, "dog": 0.1}, "1", "dog"),
        ({"cat": 0.9, "dog": 0.1}, "dog", "dog"),
        ({"cat": 0.9, "dog": 0.1}, 7, 7),
        ([0.9, 0.1], 1, 1),
        ("a text", 1, 1),
    ],
)
def test_a_class_number_becomes_a_name_if_the_model_returns_names(
    answer: Any, label: Any, expected: Any
) -> None:
    headers = {"content-type": "application/json"}
    reference = ComparedAnswer(200, headers, json.dumps(answer).encode())
    assert with_names([label], [reference], {"0": "cat", "1": "dog"}) == [expected]
