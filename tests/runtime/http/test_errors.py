"""TorchServe's table of errors: each row's status, type and text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.models import make_model

NO_WORKER = "has no worker to serve inference request. Please use scale workers API to add workers."
NOT_ALLOWED = "Requested method is not allowed, please refer to API document."
HANDLER = """
import json


class Refusal(Exception):
    pass


def handle(data, context):
    if data is None:
        return None
    word = context.get_all_request_header(0).get("x-do", "")
    if word == "memory":
        raise MemoryError
    if word == "cuda":
        raise RuntimeError("CUDA error: out of memory")
    if word == "refuse":
        from ts.utils.util import PredictionException

        raise PredictionException("this picture is too small", 513)
    if word == "none":
        return None
    if word == "text":
        return "no list"
    if word == "too many":
        return ["a"] * (len(data) + 1)
    if word == "unsupported":
        return [{1, 2}] * len(data)
    if word == "exit":
        import os

        os._exit(3)
    if word == "hang":
        import time

        time.sleep(600)
    return ["ok"] * len(data)
"""


@pytest.fixture(scope="module")
def error_server(start_server, store):
    make_model(store / "erring.mar", HANDLER, config="retryFailedBatch: false\n")
    with start_server() as server:
        server.register("erring.mar", initial_workers=1)
        server.register("erring.mar", initial_workers=1, model_name="hanging", response_timeout=1)
        server.register("talker.mar", initial_workers=0)
        yield server


@pytest.fixture
def check(error_of):
    def check(answer, status, kind, text):
        assert answer.status_code == status
        error = error_of(answer)
        assert error[0] == kind
        assert error[1].startswith(text)

    return check


@pytest.mark.parametrize(
    ("method", "path", "params", "status", "kind", "text"),
    [
        ("POST", "/models", {}, 400, "BadRequestException", "Parameter url is required."),
        (
            "POST",
            "/models",
            {"url": "x.mar", "runtime": "X"},
            400,
            "BadRequestException",
            "Invalid RuntimeType value: X",
        ),
        (
            "PUT",
            "/models/talker",
            {"min_worker": 2, "max_worker": 1},
            400,
            "BadRequestException",
            "max_worker cannot be less than min_worker.",
        ),
        ("GET", "/models/XXX", {}, 404, "ModelNotFoundException", "Model not found: XXX"),
        ("PUT", "/models/XXX", {}, 404, "ModelNotFoundException", "Model not found: XXX"),
        ("DELETE", "/models/XXX", {}, 404, "ModelNotFoundException", "Model not found: XXX"),
        (
            "POST",
            "/models",
            {"url": "../fake.mar"},
            404,
            "ModelNotFoundException",
            "Relative path is not allowed in url: ../fake.mar",
        ),
        (
            "POST",
            "/models",
            {"url": "no.mar"},
            404,
            "ModelNotFoundException",
            "Model not found at: no.mar",
        ),
        (
            "GET",
            "/models/talker/1.3.1",
            {},
            404,
            "ModelVersionNotFoundException",
            "Model version: 1.3.1 does not exist for model: talker",
        ),
        (
            "PUT",
            "/models/talker/3.3.3/set-default",
            {},
            404,
            "ModelVersionNotFoundException",
            "Model version 3.3.3 does not exist for model talker",
        ),
        (
            "GET",
            "/fake",
            {},
            404,
            "ResourceNotFoundException",
            "Requested resource is not found, please refer to API document.",
        ),
        (
            "PATCH",
            "/models",
            {},
            405,
            "MethodNotAllowedException",
            NOT_ALLOWED,
        ),
        (
            "POST",
            "/models",
            {"url": "talker.mar"},
            409,
            "ConflictStatusException",
            "Model version 1.0 is already registered for model talker",
        ),
        (
            "GET",
            "/models/talker",
            {"customized": "true"},
            503,
            "ServiceUnavailableException",
            'Model "talker" has no worker to serve describe request. Please use scale workers API '
            "to add workers. `tsx models scale talker 1 --version 1.0` adds one.",
        ),
    ],
)
def test_management_errors_equal_torchserves(
    error_server, check, method, path, params, status, kind, text
):
    check(error_server.management.request(method, path, params=params), status, kind, text)


def test_the_model_api_can_be_disabled(start_server, check):
    with start_server(enable_model_api=False) as server:
        server.register("talker.mar", initial_workers=0)
        answer = server.management.post("/models", params={"url": "talker.mar"})
        check(answer, 405, "MethodNotAllowedException", NOT_ALLOWED)
        answer = server.management.delete("/models/talker")
        check(answer, 405, "MethodNotAllowedException", NOT_ALLOWED)
        assert server.management.get("/models").status_code == 200
        assert server.management.put("/models/talker", params={"min_worker": 0}).status_code == 202


def test_a_model_that_does_not_stop_in_time_remains_registered(
    start_server, check, tmp_path, until
):
    with start_server(unregister_model_timeout=1) as server:
        server.register("talker.mar", initial_workers=1)
        gate = tmp_path / "go"
        with ThreadPoolExecutor(1) as pool:
            prediction = pool.submit(server.ask, x_do="wait", x_file=str(gate))
            until(lambda: server.call(lambda: server.registry.find("talker").stats.requests))
            answer = server.management.delete("/models/talker")
            gate.touch()
            assert prediction.result().status_code == 200
        text = "Timed out while cleaning resources: talker"
        check(answer, 408, "RequestTimeoutException", text)
        assert server.management.get("/models/talker").status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "kind", "text"),
    [
        ("/predictions/talker", 503, "ServiceUnavailableException", f'Model "talker" {NO_WORKER}'),
        ("/invocations", 400, "BadRequestException", "Parameter model_name is required."),
    ],
)
def test_a_prediction_without_a_worker_is_refused(error_server, check, path, status, kind, text):
    check(error_server.inference.post(path), status, kind, text)


@pytest.mark.parametrize(
    ("action", "status", "text"),
    [
        ("none", 500, "Invalid model predict output"),
        ("text", 500, "Invalid model predict output"),
        ("too many", 500, "number of batch response mismatched"),
        ("unsupported", 500, "Unsupported model output data type."),
        ("memory", 507, "Out of resources"),
        ("cuda", 507, "Out of resources"),
        ("refuse", 513, "this picture is too small"),
        ("exit", 500, "Worker died."),
        ("hang", 500, "Worker died."),
    ],
)
def test_prediction_failures_equal_torchserves(error_server, check, action, status, text):
    model = "hanging" if action == "hang" else "erring"
    answer = error_server.ask(path=f"/predictions/{model}", x_do=action)
    check(answer, status, "InternalServerException", text)
