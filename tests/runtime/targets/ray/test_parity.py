"""An application of Ray Serve answers as `tsx serve` does, byte for byte."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest

from tests.runtime.targets.ray.conftest import RayServe
from tsx_runtime.grpc.protos.grpc_predict_v2_pb2 import ModelInferRequest, ModelReadyRequest, ServerLiveRequest
from tsx_runtime.grpc.protos.inference_pb2 import PredictionsRequest

PREDICT = "/predictions/talker"
TEXT, JSON = {"content-type": "text/plain"}, {"content-type": "application/json"}
TENSORS = b'{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}'
OWN = {"date", "server", "x-request-id"}  # of each server, and of each request

Case = tuple[str, str, bytes, dict[str, str]]
CASES: dict[str, Case] = {
    "json": ("POST", PREDICT, b'{"a": [1, "\xc3\xa9"]}', JSON),
    "binary": ("POST", PREDICT, bytes(range(256)) * 300, {"x-do": "bytes"}),
    "form": ("POST", PREDICT, b"a=1&b=2", {"content-type": "application/x-www-form-urlencoded"}),
    "put": ("PUT", f"{PREDICT}/1.0", b"text", TEXT),
    "query": ("GET", f"{PREDICT}?a=1&b=%20", b"", {}),
    "head": ("HEAD", PREDICT, b"", {}),
    "options": ("OPTIONS", PREDICT, b"", {}),
    "own status and header": ("POST", PREDICT, b"", {"x-do": "status"}),
    "stream": ("POST", PREDICT, b"", {"x-do": "stream"}),
    "handler raises": ("POST", PREDICT, b"", {"x-do": "raise"}),
    "not json": ("POST", PREDICT, b"{", JSON),
    "bad priority": ("POST", PREDICT, b"{}", {"x-tsx-priority": "first"}),
    "too large": ("POST", PREDICT, b"x" * 200_000, TEXT),
    "unknown model": ("POST", "/predictions/nobody", b"{}", JSON),
    "unknown version": ("POST", f"{PREDICT}/9", b"{}", JSON),
    "unknown path": ("GET", "/nothing/here", b"", {}),
    "no method": ("DELETE", "/ping", b"", {}),
    "ping": ("GET", "/ping", b"", {}),
    "ready": ("GET", "/readyz", b"", {}),
    "invocations": ("POST", "/invocations", b"{}", JSON),
    "v1": ("POST", "/v1/models/talker:predict", b'{"instances": [1]}', JSON),
    "v2 metadata": ("GET", "/v2/models/talker", b"", {}),
    "v2 infer": ("POST", "/v2/models/talker/infer", TENSORS, JSON),
    "v2 error": ("POST", "/v2/models/nobody/infer", TENSORS, JSON),
    "v2 health": ("GET", "/v2/health/ready", b"", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_http_answers_are_those_of_tsx_serve(ray_serve: RayServe, name: str) -> None:
    method, path, body, headers = CASES[name]
    own, other = (
        httpx.request(method, f"{address}{path}", content=body, headers=headers)
        for address in (f"{ray_serve.address}/talker", ray_serve.tsx.address("predictions"))
    )
    assert own.status_code == other.status_code
    assert comparable(own) == comparable(other)
    assert own.content == other.content
    assert len(own.headers.get_list("x-request-id")) == 1


def comparable(answer: httpx.Response) -> list[tuple[str, str]]:
    return sorted((name.lower(), value) for name, value in answer.headers.multi_items() if name.lower() not in OWN)


def test_the_requests_id_and_trace_context_reach_the_handler(ray_serve: RayServe) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    answer = ray_serve.post("/talker/predictions/talker", x_show="1", x_request_id="order-66", traceparent=trace)
    assert answer.headers["x-request-id"] == "order-66"
    assert {name: answer.json()[name] for name in ("id", "trace")} == {"id": "order-66", "trace": trace}


CALLS: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "predictions": (
        "InferenceAPIsService/Predictions",
        PredictionsRequest(model_name="talker", input={"data": b"abc"}).SerializeToString(),
        {},
    ),
    "own status": ("InferenceAPIsService/Predictions", PredictionsRequest(model_name="talker").SerializeToString(), {"x-do": "status"}),
    "handler raises": ("InferenceAPIsService/Predictions", PredictionsRequest(model_name="talker").SerializeToString(), {"x-do": "raise"}),
    "unknown model": ("InferenceAPIsService/Predictions", PredictionsRequest(model_name="nobody").SerializeToString(), {}),
    "not a message": ("InferenceAPIsService/Predictions", b"\xff\xff", {}),
    "ping": ("InferenceAPIsService/Ping", b"", {}),
    "stream": ("InferenceAPIsService/StreamPredictions", PredictionsRequest(model_name="talker").SerializeToString(), {"x-do": "stream"}),
    "stream of nobody": ("InferenceAPIsService/StreamPredictions", PredictionsRequest(model_name="nobody").SerializeToString(), {}),
    "live": ("GRPCInferenceService/ServerLive", ServerLiveRequest().SerializeToString(), {}),
    "model ready": ("GRPCInferenceService/ModelReady", ModelReadyRequest(name="talker").SerializeToString(), {}),
    "infer": ("GRPCInferenceService/ModelInfer", ModelInferRequest(model_name="talker", id="1").SerializeToString(), {}),
    "stream infer": ("GRPCInferenceService/ModelStreamInfer", ModelInferRequest(model_name="nobody", id="1").SerializeToString(), {}),
}
PACKAGES = {"InferenceAPIsService": "org.pytorch.serve.grpc.inference", "GRPCInferenceService": "inference"}


@pytest.mark.parametrize("name", CALLS)
def test_grpc_answers_are_those_of_tsx_serve(ray_serve: RayServe, name: str) -> None:
    method, request, metadata = CALLS[name]
    path = f"/{PACKAGES[method.partition('/')[0]]}.{method}"
    other = call(ray_serve.tsx.address("gRPC predictions"), path, request, metadata)
    assert call(ray_serve.grpc, path, request, {**metadata, "application": "talker"}) == other


def call(target: str, path: str, request: bytes, metadata: dict[str, str]) -> tuple[list[bytes], grpc.StatusCode, str]:
    """The messages of the answer, its status and details."""
    with grpc.insecure_channel(target) as channel:
        is_stream = "Stream" in path
        ask: Any = channel.unary_stream(path) if is_stream else channel.unary_unary(path).with_call
        messages: list[bytes] = []
        try:
            answer = ask(request, metadata=list(metadata.items()))
            if is_stream:
                messages.extend(answer)
            else:
                message, answer = answer
                messages.append(message)
        except grpc.RpcError as error:
            answer = error
        return messages, answer.code(), answer.details()
