"""Tables of MLflow's clients, which become rows of a model's input."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tsx_runtime.worker.codecs.v2_json import MalformedTensors
from tsx_runtime.worker.handlers.models.input_spec import InputSpec
from tsx_runtime.worker.handlers.steps.tensor_requests import PREDICTIONS, read_request


@pytest.mark.parametrize(
    "table",
    [
        {"dataframe_split": {"index": [0, 1], "columns": ["a", "b"], "data": [[1, 2], [3, 4]]}},
        {"dataframe_records": [{"a": 1, "b": 2}, {"b": 4, "a": 3}]},
    ],
)
def test_a_table_becomes_rows_and_its_answer_has_predictions(table: dict[str, Any]) -> None:
    read = read_request({"body": bytearray(json.dumps(table), "utf-8")}, [InputSpec()])
    assert (read.inputs[0].tolist(), read.single, read.form) == (
        [[1, 2], [3, 4]],
        False,
        PREDICTIONS,
    )


@pytest.mark.parametrize(
    "table",
    [
        {"dataframe_split": [[1]]},
        {"dataframe_split": {"columns": ["a"]}},
        {"dataframe_records": [[1]]},
        {"dataframe_records": [{"a": 1}, {"b": 1}]},
    ],
)
def test_the_error_for_an_invalid_table_shows_the_format(table: dict[str, Any]) -> None:
    with pytest.raises(
        MalformedTensors, match=r'"columns" and "data".*a list of objects with the same names'
    ):
        read_request({"body": table}, [InputSpec()])


def test_fractions_are_not_truncated_for_a_model_of_integers() -> None:
    spec = InputSpec("", (2,), torch.int64, True)
    assert read_request({"body": [[1.0, 2.0]]}, [spec]).inputs[0].tolist() == [[1, 2]]
    with pytest.raises(MalformedTensors, match="fractions, and the model takes int64"):
        read_request({"body": [[1.5, 2]]}, [spec])
