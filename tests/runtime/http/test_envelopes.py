"""KServe's protocols over HTTP for handlers that do not know them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.servers import a_server
from tests.runtime.conftest import RunningServer

DOUBLING_HANDLER = """
def handle(data, context):
    if data is None:
        return None
    if context.get_request_header(0, "explain") == "True":
        return [f"twice {value}" for value in data]
    return [[entry * 2 for entry in value["data"]] if isinstance(value, dict) else value * 2 for value in data]
"""


@pytest.fixture(scope="module")
def enveloped(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Serve two models; the server's default envelope applies to the archive without one."""
    models = {
        "first": DOUBLING_HANDLER,
        "open": {"handler": DOUBLING_HANDLER, "envelope": "kservev2"},
    }
    store = tmp_path_factory.mktemp("enveloped")
    with a_server(store, models, service_envelope="kserve") as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/models/first:predict", {"instances": [1, "ab"]}, {"predictions": [2, "abab"]}),
        (
            "/v1/models/first:explain",
            {"instances": [1, "ab"]},
            {"explanations": ["twice 1", "twice ab"]},
        ),
        ("/predictions/first", {"instances": [1]}, {"predictions": [2]}),
        (
            "/v2/models/open/infer",
            {
                "id": "a",
                "inputs": [{"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2]}],
            },
            {
                "id": "a",
                "model_name": "open",
                "model_version": "1.0",
                "outputs": [{"name": "x", "shape": [2], "datatype": "INT64", "data": [2, 4]}],
            },
        ),
    ],
)
def test_an_envelope_is_removed_and_added_again(enveloped, path, body, expected):
    answer = enveloped.inference.post(path, json=body)
    assert (answer.status_code, answer.json()) == (200, expected)


@pytest.mark.parametrize("lane", ["fast", "asgi"])
@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/plain", "application/octet-stream"]
)
@pytest.mark.parametrize(
    "path", ["/predictions/first", "/v1/models/first:predict", "/first/predict"]
)
def test_json_is_accepted_with_any_content_type(enveloped, lane, kind, path):
    answer = enveloped.ask(
        b'{"instances": [{"data": [1]}, "a=b&c"]}', path, lane=lane, content_type=kind
    )
    assert (answer.status_code, answer.json()) == (200, {"predictions": [[2], "a=b&ca=b&c"]})


def test_a_request_without_an_envelope_is_refused_with_the_expected_form(enveloped):
    answer = enveloped.inference.post("/predictions/first", json=[1])
    assert answer.status_code == 400
    assert '{"instances": [...]}' in answer.json()["message"]
