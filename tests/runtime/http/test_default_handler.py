"""A model without a handler over HTTP: its requests, example and description."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tsx_archiver import ArchiveSpec, write_archive

ROW = [1, 2, 3]
SUM = [6.0, 12.0]
NPY = io.BytesIO()
np.save(NPY, np.array([ROW, ROW]))
TENSOR: dict[str, Any] = {"name": "x", "shape": [1, 3], "datatype": "FP32"}
BINARY = json.dumps(
    {
        "inputs": [TENSOR | {"parameters": {"binary_data_size": 12}}],
        "parameters": {"binary_data_output": True},
    }
).encode()


@pytest.fixture(scope="module")
def sums(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store: Path = tmp_path_factory.mktemp("sums")
    layer = torch.nn.Linear(3, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    torch.export.save(torch.export.export(layer, (torch.zeros(1, 3),)), store / "sums.pt2")
    write_archive(
        ArchiveSpec("sums", handler="base_handler", serialized_file=store / "sums.pt2"), store
    )
    with running_server(make_settings(store)) as server:
        server.register("sums.mar", initial_workers=1)
        yield server


@pytest.mark.parametrize("lane", ["fast", "asgi"])
@pytest.mark.parametrize(
    ("path", "body", "kind", "expected"),
    [
        ("/predictions/sums", json.dumps(ROW), "application/json", SUM),
        # curl -d sends this content type.
        ("/predictions/sums", json.dumps(ROW), "application/x-www-form-urlencoded", SUM),
        ("/predictions/sums", NPY.getvalue(), "application/octet-stream", [SUM, SUM]),
        ("/sums/predict", json.dumps({"data": ROW}), "application/json", SUM),
        (
            "/v1/models/sums:predict",
            json.dumps({"instances": [ROW]}),
            "application/json",
            {"predictions": [SUM]},
        ),
        (
            "/v2/models/sums/infer",
            json.dumps({"inputs": [TENSOR | {"data": ROW}]}),
            "application/json",
            {
                "model_name": "sums",
                "model_version": "1.0",
                "outputs": [{"name": "output", "datatype": "FP32", "shape": [1, 2], "data": SUM}],
            },
        ),
    ],
)
def test_each_protocol_is_answered_in_its_own_form(sums, lane, path, body, kind, expected):
    answer = sums.ask(
        body.encode() if isinstance(body, str) else body, path, lane=lane, content_type=kind
    )
    assert (answer.status_code, answer.headers["content-type"], answer.json()) == (
        200,
        "application/json",
        expected,
    )


@pytest.mark.parametrize("lane", ["fast", "asgi"])
@pytest.mark.parametrize("path", ["/predictions/sums", "/sums/predict?data=[1]&data=[2]"])
def test_a_repeated_field_is_refused_with_its_name(sums, lane, path):
    body = b"" if "?" in path else b"data=[1]&data=[2]"
    answer = sums.ask(body, path, lane=lane, content_type="application/x-www-form-urlencoded")
    assert (answer.status_code, answer.json()["type"]) == (400, "BadRequestException")
    assert answer.json()["message"].startswith("The field 'data' comes several times")


def test_binary_tensors_are_answered_with_binary_tensors(sums):
    answer = sums.ask(
        BINARY + struct.pack("<3f", *ROW),
        "/v2/models/sums/infer",
        inference_header_content_length=str(len(BINARY)),
    )
    head = int(answer.headers["inference-header-content-length"])
    assert struct.unpack("<2f", answer.content[head:]) == tuple(SUM)


@pytest.mark.parametrize("lane", ["fast", "asgi"])
@pytest.mark.parametrize("path", ["/predictions/sums", "/v2/models/sums/infer"])
def test_a_request_with_a_wrong_shape_is_refused_with_an_example(sums, lane, path):
    answer = sums.ask(b"[1, 2]", path, lane=lane, content_type="application/json")
    message = answer.json()["message"]
    assert (answer.status_code, answer.json()["type"]) == (400, "BadRequestException")
    assert message.startswith("The request has the shape [2].")
    assert message.endswith("Example: [0, 0, 0]")
    assert not sums.registry.find("sums").stats.error_log.errors


def test_the_web_page_offers_a_working_example(sums):
    (sample,) = sums.management.get("/ui/api/samples/sums/1.0").json()
    assert sample == {"name": "example.json", "type": "application/json", "size": 9}
    example = sums.management.get("/ui/api/samples/sums/1.0/example.json")
    answer = sums.management.post(
        "/ui/api/predict/sums",
        content=example.content,
        headers={"content-type": "application/json"},
    )
    assert (example.content, answer.json()) == (b"[0, 0, 0]", [0.0, 0.0])
    description = sums.management.get("/models/sums?customized=true").json()[0][
        "customizedMetadata"
    ]
    assert description == {
        "inputs": [{"name": "input", "shape": [3], "datatype": "float32", "example": [3]}],
        "example": "[0, 0, 0]",
    }
