"""`GET /` on each address, and the paths and models that a 404 suggests."""

from __future__ import annotations

import pytest


def test_the_index_lists_its_paths_and_the_other_addresses(server):
    inference, management, metrics = (
        client.get("/").json() for client in (server.inference, server.management, server.metrics)
    )
    assert inference["paths"]["POST /predictions/{model}"] == "Predict"
    assert {"GET /models", "POST /models", "DELETE /models/{model}", "GET /ui/"} <= set(
        management["paths"]
    )
    assert metrics["paths"] == {
        "GET /metrics": "All metrics as Prometheus text",
        "GET /readyz": "Is the default version of every model ready",
        "GET /api-description": "All paths, as an OpenAPI document",
        "GET /docs": "The same in a browser",
    }
    assert inference["elsewhere"] == {
        "management": server.settings.management_address,
        "metrics": server.settings.metrics_address,
    }
    assert management["elsewhere"].keys() == {"inference", "metrics"}
    assert server.inference.options("/").json()["openapi"]
    refusal = server.inference.post("/")
    assert refusal.status_code == 405
    assert set(refusal.headers["allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}


def test_the_index_redirects_browsers_to_the_web_page(server):
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    answer = server.management.get("/", headers=browser)
    assert (answer.status_code, answer.headers["location"]) == (307, "ui/")
    assert "text/html" in server.management.get("/ui/", headers=browser).headers["content-type"]
    assert server.inference.get("/", headers=browser).headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("role", "path", "hint"),
    [
        ("inference", "/predict/talker", "Did you mean /predictions/talker?"),
        ("inference", "/models", "It is on the management address, http://127.0.0.1:8081."),
        ("inference", "/predictions/", "The path names no model: /predictions/MODEL."),
        ("inference", "/predictions/tlaker", "Model not found: tlaker; did you mean 'talker'?"),
        ("management", "/models/tlaker", "Model not found: tlaker; did you mean 'talker'?"),
        ("inference", "/predictions/nobody", "Model not found: nobody"),
    ],
)
def test_a_404_suggests_the_likely_path_or_model(server, error_of, role, path, hint):
    answer = server.clients[role].get(path)
    assert answer.status_code == 404
    assert error_of(answer)[1].endswith(hint)
