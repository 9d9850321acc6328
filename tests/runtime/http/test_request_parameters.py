"""The `parameters` of a request reach the handler together with its rows."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import pytest

from tests.kit.servers import a_server
from tests.runtime.conftest import RunningServer

FUNCTION = """
def handle(data, context):
    return None if data is None else [context.get_request_parameters(0).get("temperature", 0.0) for row in data]
"""
DERIVED = """
import torch
from ts.torch_handler.base_handler import BaseHandler


class Derived(BaseHandler):
    def initialize(self, context):
        self.context, self.model, self.device = context, abs, torch.device("cpu")

    def postprocess(self, output):
        return [self.context.get_request_parameters(0).get("temperature", 0.0) for _ in output]
"""
FIELDS = """
def handle(data, context):
    if data is None:
        return None
    return [[row["a"].decode(), [value.decode() for value in context.get_request_header(0, "a")["values"]]] for row in data]
"""
PARAMETERS = {"temperature": 0.5}
TENSOR = {"name": "x", "shape": [1, 1], "datatype": "FP32"}


@pytest.fixture(scope="module")
def server(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    envelopes = ("json", "kserve", "kservev2")
    models = {"function": FUNCTION, "derived": DERIVED, "fields": FIELDS} | {
        envelope: {"handler": FUNCTION, "envelope": envelope} for envelope in envelopes
    }
    with a_server(tmp_path_factory.mktemp("parameters"), models) as server:
        yield server


@pytest.mark.parametrize(
    "kind",
    ["application/json", "application/octet-stream", "application/x-www-form-urlencoded", ""],
)
@pytest.mark.parametrize("name", ["json", "kserve", "kservev2", "derived"])
def test_parameters_accompany_the_rows_of_any_body_type(server, name, kind):
    for parameters in (PARAMETERS, None):
        rows = (
            {"inputs": [TENSOR | {"data": [1.0]}]} if name == "kservev2" else {"instances": [[1.0]]}
        )
        body = json.dumps(rows | ({"parameters": parameters} if parameters else {})).encode()
        answer = server.inference.post(
            f"/predictions/{name}", content=body, headers={"content-type": kind} if kind else {}
        )
        assert answer.status_code == 200, answer.text
        result = answer.json()
        if name == "kservev2":
            result = result["outputs"][0]["data"][0]
        elif name != "derived":
            result = result["predictions"][0]
        assert result == (0.5 if parameters else 0.0)


@pytest.mark.parametrize("name", ["function", "kservev2"])
def test_parameters_accompany_binary_tensors(server, name):
    head = json.dumps(
        {
            "inputs": [TENSOR | {"parameters": {"binary_data_size": 4}}],
            "parameters": PARAMETERS,
        }
    ).encode()
    body = head + struct.pack("<f", 1.0)
    answer = server.ask(
        body, f"/v2/models/{name}/infer", inference_header_content_length=str(len(head))
    )
    assert answer.json()["outputs"][0]["data"] == [0.5]


def test_a_row_has_the_last_value_of_a_repeated_field_and_a_header_has_all(server):
    answer = server.inference.post(
        "/predictions/fields", files=[("a", (None, b"1")), ("a", (None, b"2"))]
    )
    assert (answer.status_code, answer.json()) == (200, ["2", ["1", "2"]])
