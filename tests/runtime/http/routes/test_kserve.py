"""KServe's two protocols, SageMaker's and TorchServe's older paths: which model they mean, and what
they answer besides.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tsx_runtime.http.routes.kserve import adapters_of

ALL = (("inference", "management", "metrics"),)


def test_the_server_tells_what_it_is(server):
    answer = server.inference.get("/v2")
    assert answer.status_code == 200
    body = answer.json()
    assert body["name"] == "Torchserve"
    assert body["extensions"] == body["extenstion"] == ["kserve", "kubeflow"]
    assert body["version"]
    assert server.inference.get("/v2/").json() == body


def test_it_is_alive_and_ready(server, start_server):
    assert server.inference.get("/v2/health/live").json() == {"live": True}
    assert server.inference.get("/v2/health/ready").json() == {"ready": True}
    with start_server(inference_token="in") as other:
        other.register("talker.mar", initial_workers=1)
        assert other.inference.get("/v2/health/ready").status_code == 200  # probes have no token
        assert other.inference.get("/v2/models/talker").status_code == 400
        other.call(lambda: setattr(other.registry, "stopping", True))
        answer = other.inference.get("/v2/health/ready")
        assert (answer.status_code, answer.json()) == (503, {"ready": False})


@pytest.mark.parametrize(
    ("path", "status", "ready"),
    [
        ("/v2/models/talker/ready", 200, True),
        ("/v2/models/talker/versions/1.0/ready", 200, True),
        ("/v2/models/talker/versions/2.0/ready", 503, False),
        ("/v1/models/talker", 200, True),
    ],
)
def test_a_model_is_ready_when_a_worker_is(server, path, status, ready):
    answer = server.inference.get(path)
    assert answer.status_code == status
    assert answer.json() == answer.json() | {"name": "talker", "ready": ready}


def test_v1_is_also_where_torchserve_has_it(server):
    answer = server.management.get("/v1/models/talker")
    assert (answer.status_code, answer.json()["name"], answer.json()["ready"]) == (
        200,
        "talker",
        True,
    )
    assert server.management.get("/v1/models").json()["models"] == ["talker"]


def test_models_tell_what_they_are(server):
    reported = {
        "name": "talker",
        "versions": ["1.0", "2.0"],
        "platform": "",
        "inputs": [],
        "outputs": [],
        "parameters": {},
    }
    assert server.inference.get("/v2/models/talker").json() == reported
    assert server.inference.get("/v2/models/talker/versions/2.0").json() == reported | {
        "versions": ["2.0"]
    }


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v2/models/nobody", "ModelNotFoundException"),
        ("/v2/models/nobody/ready", "ModelNotFoundException"),
        ("/v1/models/nobody", "ModelNotFoundException"),
        ("/v2/models/talker/versions/9", "ModelVersionNotFoundException"),
        ("/v2/models/talker/versions/9/ready", "ModelVersionNotFoundException"),
        ("/v2/health", "ResourceNotFoundException"),
        ("/v2/models/talker/versions", "ResourceNotFoundException"),
    ],
)
def test_what_is_not_there_is_not_found(server, error_of, path, kind):
    answer = server.inference.get(path)
    assert (answer.status_code, error_of(answer)[0]) == (404, kind)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/models/talker/invoke", "1.0"),
        ("/talker/predict", "1.0"),
        ("/talker/1.0/predict", "1.0"),
        ("/v1/models/talker:predict", "1.0"),
        ("/v2/models/talker/infer", "1.0"),
        ("/invocations?model_name=talker", "1.0"),
    ],
)
def test_other_names_of_a_prediction_run_the_model(server, method, path, version):
    answer = server.inference.request(method, path)
    assert answer.status_code == 200
    assert answer.json()["version"] == version


def test_query_parameters_are_inputs(server):
    row = server.inference.get("/talker/predict", params={"data": "test", "more": "1"}).json()[
        "row"
    ]
    assert row == {"data": {"bytes": "test"}, "more": {"bytes": "1"}, "body": {"bytes": ""}}


@pytest.mark.parametrize(
    "path", ["/nobody/predict", "/models/nobody/invoke", "/nobody/1.0/predict"]
)
def test_a_model_that_is_not_there_is_not_found_by_other_names_either(server, error_of, path):
    answer = server.inference.get(path)
    assert (answer.status_code, error_of(answer)) == (
        404,
        ("ModelNotFoundException", "Model not found: nobody"),
    )


@pytest.mark.parametrize(
    "path",
    ["/predict", "/a/b/c/predict", "/models/invoke", "/models//invoke", "/models/a/b/invoke"],
)
def test_what_only_looks_like_one_is_nothing(server, error_of, path):
    answer = server.inference.get(path)
    assert (answer.status_code, error_of(answer)[0]) == (404, "ResourceNotFoundException")


def test_on_one_address_a_model_called_predict_is_managed_and_one_called_token_served(start_server):
    with start_server(ALL, inference_token="in", management_token="man") as server:
        server.register("talker.mar", initial_workers=1, model_name="predict")
        manage, infer = {"authorization": "Bearer man"}, {"authorization": "Bearer in"}
        assert (
            server.inference.get("/models/predict", headers=manage).json()[0]["modelName"]
            == "predict"
        )
        assert server.inference.post("/models/predict/invoke", headers=infer).status_code == 200
        assert server.inference.post("/models/predict/invoke", headers=manage).status_code == 400
        assert server.inference.post("/predict/predict", headers=infer).status_code == 200
        assert server.inference.post("/predictions/predict", headers=infer).status_code == 200


def test_a_models_options_are_reported_for_every_name_that_it_has(server):
    paths = server.inference.options("/predictions/talker").json()["paths"]
    assert {
        "/predictions/talker",
        "/v1/models/talker:predict",
        "/v2/models/talker/infer",
        "/talker/predict",
    } <= set(paths)


@pytest.mark.parametrize("chunked", [False, True], ids=["fast lane", "other lane"])
@pytest.mark.parametrize(
    ("path", "word", "message"),
    [
        ("/v2/models/talker/infer", "raise", "no such image"),
        ("/v2/models/talker/infer", "bad priority", "x-tsx-priority"),
        ("/v2/models/nobody/infer", "", "Model not found: nobody"),
    ],
)
def test_errors_of_v2_are_where_its_clients_look(server, chunked, path, word, message):
    headers = {"x-tsx-priority": "high"} if word == "bad priority" else {"x-do": "raise"}
    answer = server.inference.post(
        path, headers=headers, content=iter([b"{}"]) if chunked else b"{}"
    )
    body = answer.json()
    assert answer.status_code >= 400
    assert message in body["error"] == body["message"]


def test_a_body_of_v2_that_names_no_type_is_json(server):
    for content in (b'{"inputs": []}', iter([b'{"inputs": []}'])):  # on both lanes
        said = server.inference.post("/v2/models/talker/infer", content=content).json()
        assert said["row"] == {"body": {"inputs": []}}
        assert said["headers"]["x-tsx-protocol"] == "v2"


@pytest.mark.parametrize("facts", [None, 5, {}, {"adapters": 5}, {"adapters": None}])
def test_the_adapters_of_a_strange_manifest_are_none(facts: Any) -> None:
    assert adapters_of(SimpleNamespace(manifest={"huggingface": facts})) == []  # type: ignore[arg-type]
