"""Tables in requests, as rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tsx_runtime.worker.codecs.v2_json import MalformedTensors
from tsx_runtime.worker.handlers.models.input_spec import InputSpec
from tsx_runtime.worker.handlers.steps.tables import rows_of_csv, rows_of_table
from tsx_runtime.worker.handlers.steps.tensor_requests import PREDICTIONS, read_request


@pytest.mark.parametrize(
    "request_",
    [
        {"dataframe_split": {"index": [0, 1], "columns": ["a", "b"], "data": [[1, 2], [3, 4]]}},
        {"dataframe_records": [{"a": 1, "b": 2}, {"b": 4, "a": 3}]},
    ],
)
def test_a_table_is_rows_and_is_answered_with_predictions(request_: dict[str, Any]) -> None:
    assert rows_of_table(request_) == [[1, 2], [3, 4]]
    read = read_request({"body": bytearray(json.dumps(request_), "utf-8")}, [InputSpec()])
    assert (read.inputs[0].tolist(), read.single, read.form) == ([[1, 2], [3, 4]], False, PREDICTIONS)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"dataframe_split": [[1]]}, '"columns" and "data"'),
        ({"dataframe_split": {"columns": ["a"]}}, '"columns" and "data"'),
        ({"dataframe_records": [[1]]}, "a list of objects"),
        ({"dataframe_records": [{"a": 1}, {"b": 1}]}, "the same columns"),
    ],
)
def test_what_is_no_table_is_refused_with_the_reason(request_: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedTensors, match=reason):
        rows_of_table(request_)


def test_a_csv_has_its_rows_below_a_line_of_names() -> None:
    assert rows_of_csv("a,b\n1,2.5\n\n3,4\n") == [[1.0, 2.5], [3.0, 4.0]]
    with pytest.raises(MalformedTensors, match="no number: could not convert string to float: 'x'"):
        rows_of_csv("a\nx\n")


def test_fractions_are_not_cut_to_the_whole_numbers_that_a_model_takes() -> None:
    spec = InputSpec("", (2,), torch.int64, True)
    assert read_request({"body": [[1.0, 2.0]]}, [spec]).inputs[0].tolist() == [[1, 2]]
    with pytest.raises(MalformedTensors, match="fractions, and the model takes int64"):
        read_request({"body": [[1.5, 2]]}, [spec])
