"""The paths of KServe, SageMaker and older TorchServe versions: their models and answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tsx_runtime.features.openai.routes import adapters_of


def test_the_server_reports_its_metadata(server):
    answer = server.inference.get("/v2")
    body = answer.json()
    assert (answer.status_code, body["name"]) == (200, "Torchserve")
    assert body["extensions"] == body["extenstion"] == ["kserve", "kubeflow"]
    assert body["version"]
    assert server.inference.get("/v2/").json() == body
    model = {
        "name": "talker",
        "versions": ["1.0", "2.0"],
        "platform": "",
        "inputs": [],
        "outputs": [],
        "parameters": {},
    }
    assert server.inference.get("/v2/models/talker").json() == model
    version = server.inference.get("/v2/models/talker/versions/2.0").json()
    assert version == model | {"versions": ["2.0"]}


def test_v2_liveness_and_readiness(server, start_server):
    assert server.inference.get("/v2/health/live").json() == {"live": True}
    assert server.inference.get("/v2/health/ready").json() == {"ready": True}
    with start_server(inference_token="in") as token_server:
        # Probes send no token.
        assert token_server.inference.get("/v2/health/ready").status_code == 200
        assert token_server.inference.get("/v2/models/talker").status_code == 400
        token_server.call(lambda: setattr(token_server.registry, "stopping", True))
        answer = token_server.inference.get("/v2/health/ready")
        assert (answer.status_code, answer.json()) == (503, {"ready": False})


@pytest.mark.parametrize(
    ("path", "status", "is_ready"),
    [
        ("/v2/models/talker/ready", 200, True),
        ("/v2/models/talker/versions/1.0/ready", 200, True),
        ("/v2/models/talker/versions/2.0/ready", 503, False),
        ("/v1/models/talker", 200, True),
    ],
)
def test_a_model_is_ready_if_a_worker_is_ready(server, path, status, is_ready):
    answer = server.inference.get(path)
    assert answer.status_code == status
    assert answer.json() == answer.json() | {"name": "talker", "ready": is_ready}


def test_v1_is_also_served_at_torchserves_path(server):
    model = server.management.get("/v1/models/talker").json()
    assert (model["name"], model["ready"]) == ("talker", True)
    assert server.management.get("/v1/models").json()["models"] == ["talker"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v2/models/nobody", "ModelNotFoundException"),
        ("/v2/models/nobody/ready", "ModelNotFoundException"),
        ("/v1/models/nobody", "ModelNotFoundException"),
        ("/nobody/predict", "ModelNotFoundException"),
        ("/models/nobody/invoke", "ModelNotFoundException"),
        ("/nobody/1.0/predict", "ModelNotFoundException"),
        ("/v2/models/talker/versions/9", "ModelVersionNotFoundException"),
        ("/v2/models/talker/versions/9/ready", "ModelVersionNotFoundException"),
        ("/v2/health", "ResourceNotFoundException"),
        ("/v2/models/talker/versions", "ResourceNotFoundException"),
        ("/predict", "ResourceNotFoundException"),
        ("/a/b/c/predict", "ResourceNotFoundException"),
        ("/models/invoke", "ResourceNotFoundException"),
        ("/models//invoke", "ResourceNotFoundException"),
        ("/models/a/b/invoke", "ResourceNotFoundException"),
    ],
)
def test_a_missing_model_or_path_is_not_found(server, error_of, path, kind):
    answer = server.inference.get(path)
    assert (answer.status_code, error_of(answer)[0]) == (404, kind)


def test_alternative_prediction_paths_run_the_model(server):
    for path in (
        "/models/talker/invoke",
        "/talker/predict",
        "/talker/1.0/predict",
        "/v1/models/talker:predict",
        "/v2/models/talker/infer",
        "/invocations?model_name=talker",
    ):
        for method in ("GET", "POST", "PUT"):
            answer = server.inference.request(method, path)
            assert answer.status_code == 200
            assert answer.json()["version"] == "1.0"


def test_models_named_predict_or_token_work_on_a_single_address(start_server):
    listeners = (("inference", "management", "metrics"),)
    with start_server(listeners, inference_token="in", management_token="man") as server:
        server.register("talker.mar", initial_workers=1, model_name="predict")
        manage, infer = {"authorization": "Bearer man"}, {"authorization": "Bearer in"}
        (model,) = server.inference.get("/models/predict", headers=manage).json()
        assert model["modelName"] == "predict"
        for path, headers, status in (
            ("/models/predict/invoke", infer, 200),
            ("/models/predict/invoke", manage, 400),
            ("/predict/predict", infer, 200),
            ("/predictions/predict", infer, 200),
        ):
            assert server.inference.post(path, headers=headers).status_code == status


def test_options_are_reported_at_every_path_of_a_model(server):
    paths = server.inference.options("/predictions/talker").json()["paths"]
    assert {
        "/predictions/talker",
        "/v1/models/talker:predict",
        "/v2/models/talker/infer",
        "/talker/predict",
    } <= set(paths)


@pytest.mark.parametrize("lane", ["fast", "other"])
@pytest.mark.parametrize(
    ("headers", "text"),
    [({"x_do": "raise"}, "no such image"), ({"x_tsx_priority": "high"}, "x-tsx-priority")],
)
def test_v2_errors_are_in_the_error_field(server, lane, headers, text):
    answer = server.ask(b"{}", "/v2/models/talker/infer", lane=lane, **headers)
    assert answer.status_code >= 400
    assert text in answer.json()["error"] == answer.json()["message"]


def test_a_v2_request_without_content_type_is_json(server):
    for lane in ("fast", "other"):
        answer = server.ask(b'{"inputs": []}', "/v2/models/talker/infer", lane=lane).json()
        assert answer["row"] == {"body": {"inputs": []}}
        assert answer["headers"]["x-tsx-protocol"] == "v2"


@pytest.mark.parametrize("huggingface_entry", [None, 5, {}, {"adapters": 5}, {"adapters": None}])
def test_an_invalid_manifest_has_no_adapters(huggingface_entry: Any) -> None:
    version: Any = SimpleNamespace(manifest={"huggingface": huggingface_entry}, added_adapters={})
    assert adapters_of(version) == []
