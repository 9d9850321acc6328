"""The model name in the body of an OpenAI request, small or large."""

from __future__ import annotations

import json

import pytest

from tsx_runtime.api.errors import error_event, to_openai_error
from tsx_runtime.api.openai import model_in_json, speaks_openai, split_name
from tsx_runtime.api.tracing import route_of
from tsx_runtime.errors import BadRequest, error_body
from tsx_runtime.wire import Parts

LARGE_FIELD = b'"x": "%b"' % (b"A" * 100_000)


def test_the_model_is_found_at_any_position_of_the_body() -> None:
    image = {
        "messages": [{"content": "A" * 100_000 + '"model": "no"'}],
        "model": "yes",
        "x": {"model": "no"},
    }
    body = json.dumps(image).encode()
    chunked_body = Parts([body[:9], body[9:]], len(body))
    assert model_in_json(body) == model_in_json(chunked_body) == "yes"
    # JSON parsers also use the last of repeated keys.
    assert model_in_json(b'{"model": "a", "\\u006dodel": "b", %b}' % LARGE_FIELD) == "b"
    assert model_in_json(b'{"model": null}') is None
    assert model_in_json(b"{%b}" % LARGE_FIELD) is None
    for values in (b'"",' * 1_100_000, b'{"a":{}},' * 400_000):
        with pytest.raises(BadRequest, match="predictions/MODEL"):
            model_in_json(b'{"model": "a", "x": [%b1]}' % values)


BODIES = [
    b"",
    b"no",
    b"[]",
    b'{"model": "%b"}' % (b"x" * 2000),
    b"[" * 60_000,
    b"\xff",
    b'{"model": 5}',
    b'{"model": 5, %b}' % LARGE_FIELD,
]


@pytest.mark.parametrize("body", BODIES, ids=[str(body[:12]) for body in BODIES])
def test_a_body_that_names_no_model_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match=r"JSON|model"):
        model_in_json(body)


def test_model_names_are_split_and_openai_paths_recognized() -> None:
    assert split_name("m") == ("m", None, None)
    assert split_name("m:1.0/ada") == ("m", "1.0", "ada")
    for path in ("/v1/models", "/v1/models/a/b", "/v2/rerank", "/v1/files"):
        assert speaks_openai(path)
    for path in ("/v1/models/a:predict", "/x"):
        assert not speaks_openai(path)


def test_openai_paths_are_routes_in_traces() -> None:
    for path, route in (
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/rerank", "/rerank"),
        ("/v1/models/m:predict", "/v1/models/{model}:predict"),
    ):
        assert route_of(path) == route


def test_errors_have_openais_and_torchserves_fields() -> None:
    error = json.loads(
        to_openai_error(error_body(404, "ModelNotFoundException", "Model not found: é"))
    )
    assert error["error"] == {
        "message": "Model not found: é",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert error["message"] == "Model not found: é"
    assert to_openai_error(b"no error") == b"no error"
    for cause, message in (
        ("it died", "it died"),
        ('{"error": {"message": "own"}}', "own"),
        (error_body(500, "X", "long").decode(), "long"),
    ):
        event = json.loads(error_event(cause).strip().removeprefix(b"data: "))
        assert event["error"]["message"] == message
