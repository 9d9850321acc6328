"""Guards, listeners, API documents and unexpected errors, which concern all routes."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.support.apps import bare_app
from tsx_runtime.api.urls import RESERVED_PATHS
from tsx_runtime.http.build import build_apps
from tsx_runtime.settings.schema import ROLES, Settings

PATH = "/predictions/talker"
ALL = (ROLES,)


def bearer(token):
    return {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def documents(server):
    """Return the API documents of the inference, management and metrics addresses."""
    return [client.get("/openapi.json").json() for client in server.clients.values()]


def test_each_listener_describes_its_own_routes(documents):
    inference, management, metrics = (document["paths"].keys() for document in documents)
    health = {"/livez", "/readyz"}
    shared_paths = {"/ping", "/predictions/{model}/{version}", "/explanations/{model}"} | health
    assert shared_paths <= inference
    assert "/models" not in inference
    models = {"/models/{model}/{version}/set-default", "/models/{model}/traffic", "/v1/models"}
    assert models | {"/workflows/{workflow}", "/debug/slowest"} | health <= management
    assert not [path for path in management if path.startswith(("/predictions", "/metrics"))]
    assert metrics == {"/metrics"} | health


def test_every_server_path_begins_with_a_reserved_word(documents):
    first = {path.split("/")[1] for document in documents for path in document["paths"]}
    assert first <= RESERVED_PATHS | {"{model}", "rerank"}


def test_every_operation_has_an_id_and_a_summary(documents):
    for document in documents:
        operations = [
            operation for path in document["paths"].values() for operation in path.values()
        ]
        assert len({operation["operationId"] for operation in operations}) == len(operations)
        assert all(operation["summary"] for operation in operations)


def test_registration_is_documented_for_query_and_body(documents):
    post = documents[1]["paths"]["/models"]["post"]
    assert {"url", "model_name", "batch_size", "initial_workers", "synchronous"} <= {
        parameter["name"] for parameter in post["parameters"]
    }
    assert "url" in post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"200", "202", "400", "404", "409", "500"} <= set(post["responses"])


def test_the_document_is_at_torchserves_path(server, documents):
    for client, document in zip(server.clients.values(), documents, strict=True):
        assert client.options("/").json() == document
        assert client.get("/api-description").json() == document


def test_predictions_need_the_inference_token(start_server, error_of):
    with start_server(inference_token="in", management_token="man") as server:
        server.register("talker.mar", initial_workers=1)
        for headers in ({}, bearer("man"), {"authorization": "in"}):
            answer = server.inference.post(PATH, headers=headers)
            assert answer.status_code == 400
            assert "www-authenticate" not in answer.headers
            kind, text = error_of(answer)
            assert kind == "InvalidKeyException"
            assert text.startswith(
                "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
            )
        assert server.inference.post(PATH, headers=bearer("in")).status_code == 200
        assert server.inference.get("/ping").status_code == 200
        for client, path in (
            (server.management, "/models"),
            (server.management, "/models/talker/"),
            (server.metrics, "/metrics"),
        ):
            assert client.get(path).status_code == 400
            assert client.get(path, headers=bearer("in")).status_code == 400
            assert client.get(path, headers=bearer("man")).status_code == 200
            assert client.options("/").status_code == 200


def test_a_wrong_token_can_be_answered_401(start_server, error_of):
    with start_server(
        inference_token="in", management_token="man", token_failure_status=401
    ) as server:
        for answer in (server.inference.post(PATH), server.management.get("/models")):
            assert (answer.status_code, error_of(answer)[0]) == (401, "InvalidKeyException")
            assert answer.headers["www-authenticate"] == "Bearer"


def test_a_page_of_another_origin_cannot_manage_models(server, error_of):
    for client, path in ((server.management, "/models"), (server.metrics, "/metrics")):
        for headers in (
            {"host": "evil.example.org"},
            {"origin": "https://evil.example.org"},
            {"origin": "null"},
        ):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 403
            assert error_of(answer)[0] == "ForeignOriginException"
        local = {"host": "localhost:1234", "origin": "http://localhost:3000"}
        assert client.get(path, headers=local).status_code == 200


def test_one_listener_can_serve_all_routes(start_server):
    with start_server(ALL, inference_token="in", management_token="man") as server:
        server.register("talker.mar", initial_workers=1)
        assert len(set(server.addresses.values())) == 1
        assert server.inference.post(PATH, headers=bearer("in")).status_code == 200
        assert server.inference.post(PATH, headers=bearer("man")).status_code == 400
        assert server.inference.get("/models", headers=bearer("man")).json()["models"]
        assert server.inference.get("/models", headers=bearer("in")).status_code == 400
        assert "Requests2XX" in server.inference.get("/metrics", headers=bearer("man")).text


@pytest.fixture
def failing_app():
    app = bare_app(Settings())

    @app.get("/debug/fails")
    async def raise_error() -> None:
        raise ZeroDivisionError("secret detail")

    return app


def ask(app, path, method="GET", **kwargs):
    async def send():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app, **kwargs), base_url="http://localhost"
        ) as client:
            return await client.request(method, path)

    return asyncio.run(send())


def test_an_unexpected_error_has_the_usual_form_and_is_logged_once(failing_app, error_of, caplog):
    answer = ask(failing_app, "/debug/fails")
    assert answer.status_code == 500
    kind, message = error_of(answer)
    assert kind == "InternalServerException"
    assert "secret detail" not in message
    records = [record for record in caplog.records if record.exc_info]
    assert len(records) == 1
    assert answer.headers["x-request-id"] in records[0].getMessage()
    assert failing_app.counts.classes[5] == 1


def test_an_unexpected_error_on_an_openai_path_has_the_form_of_openai(start_server, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("secret detail")

    with start_server() as server:
        (app,) = build_apps(server.registry, server.settings, [("inference",)])
        monkeypatch.setattr(app.predictions, "_build_job", fail)
        answer = ask(app, "/v1/chat/completions", "POST")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == answer.json()["message"]
    assert "secret detail" not in answer.text


def test_a_path_prefix_cannot_bypass_a_guard(start_server):
    """Check a server with a root path, which is stripped before the guards check the path."""
    with start_server(management_token="man") as server:
        (app,) = build_apps(server.registry, server.settings, [("management",)])
        assert ask(app, "/prod/models", root_path="/prod").status_code == 400
        assert ask(app, "/models", root_path="/prod").status_code == 400
        assert ask(app, "/prod/nothing", root_path="/prod").status_code == 404


def test_an_open_server_discloses_no_addresses(start_server):
    with start_server() as server:
        settings = server.settings.model_copy(update={"inference_address": "http://0.0.0.0:8080"})
        app = build_apps(server.registry, settings)[0]
        assert app.other_addresses == {}
        assert app.not_found("/models").message.endswith("on the management address.")


def test_the_headers_of_predictions_are_documented(documents):
    post = documents[0]["paths"]["/predictions/{model}"]["post"]
    documented_headers = {
        parameter["name"] for parameter in post["parameters"] if parameter["in"] == "header"
    }
    assert documented_headers == {
        "x-tsx-priority",
        "x-tsx-timeout-ms",
        "Prefer",
        "Idempotency-Key",
        "x-tsx-callback-url",
    }
    assert {"400", "429", "503"} <= set(post["responses"])
