"""tsx applications in a Ray cluster answer like `tsx serve` and lose no request.

All cluster tests are in this file, since they share the cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
import ray

from tests.runtime.targets.ray.conftest import DEADLINE, MODEL_NAMES, RayServe
from tests.runtime.test_conformance import CASES, by_http, check
from tsx_runtime.grpc.protos.grpc_predict_v2_pb2 import (
    ModelInferRequest,
    ModelReadyRequest,
    ServerLiveRequest,
)
from tsx_runtime.grpc.protos.inference_pb2 import PredictionsRequest
from tsx_runtime.targets.ray.grpc_bridge import INFERENCE

pytestmark = pytest.mark.cluster


# Ray assigns a request id unless the client sends one.
@pytest.mark.parametrize("name", [name for name in CASES if name != "an id of the client"])
def test_http_answers_match_the_conformance_table(ray_serve: RayServe, name: str) -> None:
    check(CASES[name], by_http(f"{ray_serve.address}/talker")(CASES[name]))


def test_request_id_and_trace_context_reach_the_handler(ray_serve: RayServe) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    answer = ray_serve.post(
        "/talker/predictions/talker", x_request_id="order-66", traceparent=trace
    )
    assert answer.headers["x-request-id"] == "order-66"
    assert {name: answer.json()[name] for name in ("id", "trace")} == {
        "id": "order-66",
        "trace": trace,
    }


TALKER = PredictionsRequest(model_name="talker")
NOBODY = PredictionsRequest(model_name="nobody")
CALLS: dict[str, tuple[str, Any, dict[str, str]]] = {
    "predictions": (
        "InferenceAPIsService/Predictions",
        PredictionsRequest(model_name="talker", input={"data": b"abc"}),
        {"x-do": "headers"},
    ),
    "own status": (
        "InferenceAPIsService/Predictions",
        TALKER,
        {"x-do": "status", "x-status": "418"},
    ),
    "handler raises": ("InferenceAPIsService/Predictions", TALKER, {"x-do": "raise"}),
    "unknown model": ("InferenceAPIsService/Predictions", NOBODY, {}),
    "not a message": ("InferenceAPIsService/Predictions", b"\xff\xff", {}),
    "ping": ("InferenceAPIsService/Ping", b"", {}),
    "stream": ("InferenceAPIsService/StreamPredictions", TALKER, {"x-do": "stream"}),
    "stream of nobody": ("InferenceAPIsService/StreamPredictions", NOBODY, {}),
    "live": ("GRPCInferenceService/ServerLive", ServerLiveRequest(), {}),
    "model ready": ("GRPCInferenceService/ModelReady", ModelReadyRequest(name="talker"), {}),
    "infer": (
        "GRPCInferenceService/ModelInfer",
        ModelInferRequest(model_name="talker", id="1"),
        {"x-do": "headers"},
    ),
    "stream infer": (
        "GRPCInferenceService/ModelStreamInfer",
        ModelInferRequest(model_name="nobody", id="1"),
        {},
    ),
}
PACKAGES = {
    "InferenceAPIsService": "org.pytorch.serve.grpc.inference",
    "GRPCInferenceService": "inference",
}


@pytest.mark.parametrize("name", CALLS)
def test_grpc_answers_equal_those_of_tsx_serve(ray_serve: RayServe, name: str) -> None:
    method, message, metadata = CALLS[name]
    request = message if isinstance(message, bytes) else message.SerializeToString()
    path = f"/{PACKAGES[method.partition('/')[0]]}.{method}"
    expected = call(ray_serve.tsx.address("gRPC predictions"), path, request, metadata)
    assert call(ray_serve.grpc, path, request, {**metadata, "application": "talker"}) == expected


def call(
    target: str, path: str, request: bytes, metadata: dict[str, str]
) -> tuple[list[bytes], grpc.StatusCode, str]:
    """Return the messages of the answer, its status and its details."""
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


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_client_that_leaves_ends_its_stream(ray_serve: RayServe) -> None:
    file = ray_serve.directory / "left"
    headers = {"x-do": "forever", "x-file": str(file)}
    with httpx.stream(
        "POST", f"{ray_serve.address}/talker/predictions/talker", headers=headers
    ) as answer:
        next(answer.iter_raw())
        assert not file.exists()
    until(file.exists)


def test_models_share_replicas_and_the_least_recently_used_is_unloaded(ray_serve: RayServe) -> None:
    for name in [*MODEL_NAMES, *MODEL_NAMES[:2]]:
        answer = ray_serve.post(f"/many/predictions/{name}")
        assert (answer.status_code, answer.json()["name"]) == (200, name)
    # Any replica lists all names, although each has loaded at most two models.
    assert ray_serve.get("/many/v1/models").json()["models"] == MODEL_NAMES
    unknown = httpx.post(
        f"{ray_serve.address}/many/v1/embeddings",
        json={"model": "nobody", "input": "a"},
        timeout=DEADLINE,
    )
    assert f"Models here: {', '.join(MODEL_NAMES)}." in unknown.json()["error"]["message"]
    assert ray_serve.post("/many/predictions/nobody").status_code == 404
    form = httpx.post(
        f"{ray_serve.address}/many/invocations",
        data={"model_name": MODEL_NAMES[2], "data": "1"},
        timeout=DEADLINE,
    )
    assert form.json()["name"] == MODEL_NAMES[2]
    assert ray_serve.get(f"/many/v2/models/{MODEL_NAMES[3]}/ready").status_code == 200
    with ThreadPoolExecutor(8) as clients:
        answers = clients.map(
            lambda name: ray_serve.post(f"/many/predictions/{name}"), MODEL_NAMES * 4
        )
        assert [answer.json()["name"] for answer in answers] == MODEL_NAMES * 4


def test_grpc_reaches_a_model_on_a_shared_replica(ray_serve: RayServe) -> None:
    request = PredictionsRequest(
        model_name=MODEL_NAMES[3], input={"data": b"abc"}
    ).SerializeToString()
    with grpc.insecure_channel(ray_serve.grpc) as channel:
        ask: Any = channel.unary_unary(f"/{INFERENCE}/Predictions")
        assert MODEL_NAMES[3].encode() in ask(request, metadata=[("application", "many")])


def test_a_lost_node_fails_only_unrepeatable_requests(ray_serve: RayServe) -> None:
    """Expect an answer of the other replica, or an error that says if a retry is allowed."""
    file = ray_serve.directory / "gate"

    def ask(method: str) -> httpx.Response:
        url = f"{ray_serve.address}/talker/predictions/talker"
        headers = {"x-do": "wait", "x-file": str(file)}
        return httpx.request(method, url, headers=headers, timeout=DEADLINE)

    with ThreadPoolExecutor(8) as clients:
        plain_requests = [clients.submit(ask, "POST") for _ in range(4)]
        idempotent = [clients.submit(ask, "PUT") for _ in range(4)]
        # Both replicas are busy.
        until(lambda: len(list(ray_serve.directory.glob("gate.*"))) == 2)
        lost_node = ray_serve.cluster.list_all_nodes()[-1]
        ray_serve.cluster.remove_node(lost_node, allow_graceful=False)
        until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2)
        file.touch()
    assert {future.result().status_code for future in idempotent} == {200}
    answers = [future.result() for future in plain_requests]
    assert {answer.status_code for answer in answers} <= {200, 503}
    for error_body in [answer.json() for answer in answers if answer.status_code == 503]:
        assert error_body["type"] == "ServiceUnavailableException"
        assert "may have run" in error_body["message"]
        assert "repeat = all" in error_body["message"]
