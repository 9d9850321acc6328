"""A model with `splitRows` beside the same one without, served: to each request the same bytes, by
every way in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from tests.runtime.grpc.conftest import TIMEOUT
from tests.support.models import make_model
from tests.support.servers import FREE_GRPC_PORTS, FREE_PORTS, Running, serving
from tsx_runtime.grpc.protos import grpc_predict_v2_pb2 as messages

ROWS = [[float(row * 3 + column) / 8 for column in range(3)] for row in range(9)]


HANDLER = """
import numpy


def handle(data, context):
    return None if data is None else [(numpy.asarray(tensor["data"]) * [2, 3, 4]).tolist() for tensor in data]
"""


@pytest.fixture(scope="module")
def served(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("rows")
    for name in ("whole", "parts"):
        make_model(directory / f"{name}.mar", HANDLER)
    models = [
        "--set",
        "models.parts.split_rows=2",
        "--set",
        "models.parts.workers=2",
        "--set",
        "models.parts.batch_size=2",
    ]
    words = [
        "serve",
        directory / "whole.mar",
        directory / "parts.mar",
        *models,
        *FREE_PORTS,
        *FREE_GRPC_PORTS,
    ]
    environment = {
        "TSX_CACHE_DIR": str(directory / "cache"),
        "TSX_WORKER_PRELOAD": "false",
        "TSX_SERVICE_ENVELOPE": "kservev2",
    }
    with serving(words, directory, environment) as running:
        yield running


def requests(running: Running) -> dict[str, float]:
    text = httpx.get(running.address("metrics").removesuffix("/metrics") + "/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("ts_inference_requests_total{")]
    return {
        name: sum(float(line.rpartition(" ")[2]) for line in lines if f'"{name}"' in line)
        for name in ("whole", "parts")
    }


@pytest.mark.parametrize("lane", ["fast", "other"])
@pytest.mark.parametrize("form", ["json", "json for bytes", "bytes"])
def test_rest_clients_cannot_tell_the_difference(served: Running, form: str, lane: str) -> None:
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [9, 3]}
    parameters = {} if form == "json" else {"binary_data_output": True}
    headers = {"content-type": "application/json"}
    if form == "bytes":
        raw = np.array(ROWS, "float32").tobytes()
        sized = tensor | {"parameters": {"binary_data_size": len(raw)}}
        head = json.dumps({"id": "7", "inputs": [sized], "parameters": parameters}).encode()
        body, headers = head + raw, {"inference-header-content-length": str(len(head))}
    else:
        body = json.dumps(
            {"id": "7", "inputs": [tensor | {"data": [*chain(*ROWS)]}], "parameters": parameters}
        ).encode()
    before, answers = requests(served), {}
    for name in ("whole", "parts"):
        content = body if lane == "fast" else iter([body])  # chunked bodies go the other way
        answers[name] = httpx.post(
            f"{served.address('predictions')}/v2/models/{name}/infer",
            content=content,
            headers=headers,
        )
        assert answers[name].status_code == 200, answers[name].text
    whole, parts = answers["whole"], answers["parts"]
    assert parts.content == whole.content.replace(b"whole", b"parts")
    assert {**parts.headers, "x-request-id": ""} == {**whole.headers, "x-request-id": ""}
    after = requests(served)
    assert {name: after[name] - before[name] for name in after} == {"whole": 1, "parts": 1}


@pytest.mark.parametrize("raw", [True, False])
def test_grpc_clients_cannot_either(served: Running, raw: bool) -> None:
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [9, 3]}
    numbers = np.array(ROWS, "float32")
    more: dict[str, Any] = {"raw_input_contents": [numbers.tobytes()]} if raw else {}
    if not raw:
        tensor["contents"] = {"fp32_contents": numbers.ravel().tolist()}
    with grpc.insecure_channel(served.address("gRPC predictions")) as channel:
        name = "/inference.GRPCInferenceService/ModelInfer"
        infer = channel.unary_unary(
            name,
            messages.ModelInferRequest.SerializeToString,
            messages.ModelInferResponse.FromString,
        )
        answers = [
            infer(
                messages.ModelInferRequest(model_name=model, id="5", inputs=[tensor], **more),
                timeout=TIMEOUT,
            )
            for model in ("whole", "parts")
        ]
    answers[1].model_name = "whole"
    assert answers[0] == answers[1]
    assert list(answers[0].outputs[0].shape) == [9, 3]


def refusals(served: Running, tensor: dict[str, Any]) -> list[httpx.Response]:
    urls = [
        f"{served.address('predictions')}/v2/models/{name}/infer" for name in ("whole", "parts")
    ]
    return [httpx.post(url, json={"inputs": [tensor]}) for url in urls]


def test_a_request_of_more_parts_than_the_queue_holds_is_refused(served: Running) -> None:
    answers = refusals(
        served, {"name": "x", "datatype": "FP32", "shape": [202, 3], "data": [1] * 606}
    )
    assert [answer.status_code for answer in answers] == [200, 413]
    assert (
        "202 rows, in 101 parts of 2 (splitRows), and the queue holds 100"
        in answers[1].json()["error"]
    )


def test_an_error_of_a_part_is_the_answer(served: Running) -> None:
    answers = refusals(served, {"name": "x", "datatype": "FP99", "shape": [3, 3], "data": [1] * 9})
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].content == answers[1].content
    assert "FP99" in answers[0].text
