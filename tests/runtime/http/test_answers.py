"""Return values and errors of handlers, as HTTP clients receive them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.servers import a_server
from tests.runtime.conftest import RunningServer

HANDLER = """
import numpy
from tsx_runtime.worker.exceptions import InvalidInput

NAN = float("nan")
VALUES = {"plain": {"a": 0.5}, "numpy": {"a": numpy.float32(0.5), "b": [numpy.int64(1)]}, "nan": [0.5, NAN, float("-inf")], "text": "text"}

def handle(data, context):
    return [act(row["body"] if isinstance(row, dict) else row) for row in data or []]

def act(body):
    word = body["inputs"][0]["data"][0] if isinstance(body, dict) else body
    word = word[0] if isinstance(word, list) else word
    if word == "invalid":
        raise InvalidInput("no such city")
    return VALUES[word]
"""
V2 = "/v2/models/words/infer"


@pytest.fixture(scope="module")
def server(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = {"words": HANDLER, "enveloped": {"handler": HANDLER, "envelope": "json"}}
    with a_server(tmp_path_factory.mktemp("answers"), models) as server:
        yield server


def tensor(value: str) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": [value]}]}


@pytest.mark.parametrize("lane", ["fast", "asgi"])
@pytest.mark.parametrize(
    ("value", "kind", "body"),
    [
        ("plain", "application/json", '{\n  "a": 0.5\n}'),
        ("numpy", "application/json", '{\n  "a": 0.5,\n  "b": [\n    1\n  ]\n}'),
        ("nan", "application/json", "[\n  0.5,\n  null,\n  null\n]"),
        ("text", None, "text"),
    ],
)
def test_a_return_value_becomes_standard_json_with_a_content_type(server, lane, value, kind, body):
    answer = server.ask(
        json.dumps(value).encode(), "/predictions/words", lane=lane, content_type="application/json"
    )
    assert (answer.status_code, answer.headers.get("content-type"), answer.text) == (
        200,
        kind,
        body,
    )
    assert answer.headers.get_list("cache-control") == [
        "no-cache; no-store, must-revalidate, private"
    ]


@pytest.mark.parametrize("lane", ["fast", "asgi"])
@pytest.mark.parametrize("path", ["/predictions/words", "/v1/models/words:predict", V2])
def test_an_invalid_input_is_refused_with_the_handlers_message(server, lane, path):
    answer = server.ask(
        json.dumps(tensor("invalid") if path == V2 else "invalid").encode(),
        path,
        lane=lane,
        content_type="application/json",
    )
    error = {"code": 400, "type": "BadRequestException", "message": "no such city"}
    error |= {"error": "no such city"} if path == V2 else {}
    assert (answer.status_code, answer.json()) == (400, error)
    assert not server.registry.find("words").stats.error_log.errors


def test_a_handler_error_is_answered_500(server):
    answer = server.ask(b'"unknown"', "/predictions/words", content_type="application/json")
    assert (answer.status_code, answer.json()["message"]) == (
        500,
        "Prediction failed: KeyError: 'unknown'",
    )


def test_tensors_and_envelopes_have_a_content_type(server):
    request = tensor("nan") | {
        "parameters": {"binary_data_output": False},
        "outputs": [{"name": "y", "parameters": {"binary_data": False}}],
    }
    head = json.dumps(request).encode()
    tensors = server.ask(head, V2, inference_header_content_length=str(len(head)))
    assert (tensors.status_code, tensors.headers["content-type"]) == (200, "application/json")
    assert tensors.json()["outputs"][0]["data"] == [0.5, None, None]
    enveloped = server.ask(
        b'{"instances": ["nan"]}', "/predictions/enveloped", content_type="application/json"
    )
    assert (enveloped.headers["content-type"], enveloped.text) == (
        "application/json",
        '{"predictions": [[0.5, null, null]]}',
    )


@pytest.mark.slow
def test_settings_restore_torchserves_status_and_pythons_nan(processes, tmp_path):
    with a_server(
        tmp_path / "models", {"words": HANDLER}, handler_error_status=503, json_nan="literal"
    ) as server:
        unknown, invalid, nan = (
            server.ask(body, "/predictions/words", content_type="application/json")
            for body in (b'"unknown"', b'"invalid"', b'"nan"')
        )
        assert (unknown.status_code, invalid.status_code) == (503, 400)
        assert nan.text == "[\n  0.5,\n  NaN,\n  -Infinity\n]"
