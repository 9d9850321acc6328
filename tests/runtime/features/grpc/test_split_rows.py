"""A model with `splitRows` answers byte for byte like one without, over REST and gRPC."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from tests.runtime.features.grpc.conftest import TIMEOUT
from tests.support.servers import Running
from tsx_runtime.grpc.protos import grpc_predict_v2_pb2 as messages

TENSOR = {"name": "x", "datatype": "FP32"}
ROWS = [[float(row * 3 + column) / 8 for column in range(3)] for row in range(9)]


def count_requests(enveloped: Running) -> dict[str, float]:
    text = httpx.get(f"{enveloped.address('metrics')}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("ts_inference_requests_total{")]
    return {
        name: sum(float(line.rpartition(" ")[2]) for line in lines if f'"{name}"' in line)
        for name in ("whole", "parts")
    }


@pytest.mark.parametrize("lane", ["fast", "other"])
@pytest.mark.parametrize("form", ["json", "json for bytes", "bytes"])
def test_rest_answers_are_identical_with_split_rows(
    enveloped: Running, form: str, lane: str
) -> None:
    tensor: dict[str, Any] = {**TENSOR, "shape": [9, 3]}
    parameters = {} if form == "json" else {"binary_data_output": True}
    headers, raw = {"content-type": "application/json"}, b""
    if form == "bytes":
        raw = np.array(ROWS, "float32").tobytes()
        tensor["parameters"] = {"binary_data_size": len(raw)}
    else:
        tensor["data"] = [*chain(*ROWS)]
    body = json.dumps({"id": "7", "inputs": [tensor], "parameters": parameters}).encode()
    if raw:
        headers = {"inference-header-content-length": str(len(body))}
        body += raw
    count_before = count_requests(enveloped)
    # A body in chunks goes to the ASGI lane.
    whole_answer, split_answer = (
        httpx.post(url, content=body if lane == "fast" else iter([body]), headers=headers)
        for url in urls(enveloped)
    )
    assert (whole_answer.status_code, split_answer.status_code) == (200, 200), split_answer.text
    assert split_answer.content == whole_answer.content.replace(b"whole", b"parts")
    varying_headers = {"x-request-id": "", "date": ""}
    assert {**split_answer.headers, **varying_headers} == {
        **whole_answer.headers,
        **varying_headers,
    }
    count_after = count_requests(enveloped)
    assert {name: count_after[name] - count_before[name] for name in count_after} == {
        "whole": 1,
        "parts": 1,
    }


@pytest.mark.parametrize("raw", [True, False])
def test_grpc_answers_are_identical_with_split_rows(enveloped: Running, raw: bool) -> None:
    tensor: dict[str, Any] = {**TENSOR, "shape": [9, 3]}
    numbers = np.array(ROWS, "float32")
    raw_fields: dict[str, Any] = {"raw_input_contents": [numbers.tobytes()]} if raw else {}
    if not raw:
        tensor["contents"] = {"fp32_contents": numbers.ravel().tolist()}
    with grpc.insecure_channel(enveloped.address("gRPC predictions")) as channel:
        name = "/inference.GRPCInferenceService/ModelInfer"
        infer = channel.unary_unary(
            name,
            messages.ModelInferRequest.SerializeToString,
            messages.ModelInferResponse.FromString,
        )
        answers = [
            infer(
                messages.ModelInferRequest(model_name=model, id="5", inputs=[tensor], **raw_fields),
                timeout=TIMEOUT,
            )
            for model in ("whole", "parts")
        ]
    answers[1].model_name = "whole"
    assert answers[0] == answers[1]
    assert list(answers[0].outputs[0].shape) == [9, 3]


def urls(enveloped: Running) -> list[str]:
    address = enveloped.address("predictions")
    return [f"{address}/v2/models/{name}/infer" for name in ("whole", "parts")]


def answers_to(enveloped: Running, rows: int, **changes: Any) -> list[httpx.Response]:
    tensor = {**TENSOR, "shape": [rows, 3], "data": [1] * 3 * rows, **changes}
    return [httpx.post(url, json={"inputs": [tensor]}) for url in urls(enveloped)]


def test_a_request_with_more_chunks_than_the_queue_holds_is_refused(enveloped: Running) -> None:
    whole_answer, split_answer = answers_to(enveloped, 202)
    assert (whole_answer.status_code, split_answer.status_code) == (200, 413)
    assert "202 rows, in 101 parts of 2 (splitRows)" in split_answer.json()["error"]


def test_an_error_of_one_chunk_is_the_answer(enveloped: Running) -> None:
    whole_answer, split_answer = answers_to(enveloped, 3, datatype="FP99")
    assert (whole_answer.status_code, split_answer.status_code) == (400, 400)
    assert split_answer.content == whole_answer.content
    assert "FP99" in whole_answer.text
