"""What handlers return and raise, as HTTP clients get it: on both lanes, in KServe's protocols, and
as the settings say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.conftest import RunningServer, make_settings, running_server

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
def words(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(make_settings(tmp_path_factory.mktemp("answers"))) as server:
        server.write_mar("words.mar", handler=HANDLER)
        server.write_mar("enveloped.mar", handler=HANDLER, envelope="json")
        for file in ("words.mar", "enveloped.mar"):
            server.register(file, initial_workers=1)
        yield server


def tensor(word: str) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": [word]}]}


@pytest.mark.parametrize("lane", ["fast", "other"])
@pytest.mark.parametrize(
    ("word", "kind", "body"),
    [
        ("plain", "application/json", '{\n  "a": 0.5\n}'),
        ("numpy", "application/json", '{\n  "a": 0.5,\n  "b": [\n    1\n  ]\n}'),
        ("nan", "application/json", "[\n  0.5,\n  null,\n  null\n]"),
        ("text", None, "text"),
    ],
)
def test_what_a_handler_returns_is_labelled_json_that_anybody_reads(
    words: RunningServer, lane: str, word: str, kind: str | None, body: str
) -> None:
    answer = words.ask(
        json.dumps(word).encode(), "/predictions/words", lane=lane, content_type="application/json"
    )
    assert (answer.status_code, answer.headers.get("content-type"), answer.text) == (
        200,
        kind,
        body,
    )
    assert answer.headers.get_list("cache-control") == [
        "no-cache; no-store, must-revalidate, private"
    ]


@pytest.mark.parametrize("lane", ["fast", "other"])
@pytest.mark.parametrize("path", ["/predictions/words", "/v1/models/words:predict", V2])
def test_an_invalid_input_is_refused_in_the_words_of_the_handler(
    words: RunningServer, lane: str, path: str
) -> None:
    answer = words.ask(
        json.dumps(tensor("invalid") if path == V2 else "invalid").encode(),
        path,
        lane=lane,
        content_type="application/json",
    )
    reported = answer.json()
    assert (answer.status_code, reported["code"], reported["type"], reported["message"]) == (
        400,
        400,
        "BadRequestException",
        "no such city",
    )
    assert reported.get("error") == ("no such city" if path == V2 else None)
    assert not words.registry.find("words").stats.error_log.errors


def test_a_handlers_error_is_no_sign_of_a_server_that_is_down(words: RunningServer) -> None:
    answer = words.ask(b'"unknown"', "/predictions/words", content_type="application/json")
    assert (answer.status_code, answer.json()["message"]) == (
        500,
        "Prediction failed: KeyError: 'unknown'",
    )


def test_tensors_and_envelopes_are_labelled_alike(words: RunningServer) -> None:
    wanted = tensor("nan") | {
        "parameters": {"binary_data_output": False},
        "outputs": [{"name": "y", "parameters": {"binary_data": False}}],
    }
    head = json.dumps(wanted).encode()
    tensors = words.ask(head, V2, inference_header_content_length=str(len(head)))
    assert (tensors.status_code, tensors.headers["content-type"]) == (200, "application/json")
    assert tensors.json()["outputs"][0]["data"] == [0.5, None, None]
    enveloped = words.ask(
        b'{"instances": ["nan"]}', "/predictions/enveloped", content_type="application/json"
    )
    assert (enveloped.headers["content-type"], enveloped.text) == (
        "application/json",
        '{"predictions": [[0.5, null, null]]}',
    )


@pytest.mark.slow
def test_settings_bring_back_torchserves_status_and_python_s_nan(
    processes: None, words: RunningServer
) -> None:
    settings = make_settings(
        words.settings.model_store, handler_error_status=503, json_nan="literal"
    )
    with running_server(settings) as server:
        server.register("words.mar", initial_workers=1)
        assert (
            server.ask(
                b'"unknown"', "/predictions/words", content_type="application/json"
            ).status_code
            == 503
        )
        assert (
            server.ask(
                b'"invalid"', "/predictions/words", content_type="application/json"
            ).status_code
            == 400
        )
        assert (
            server.ask(b'"nan"', "/predictions/words", content_type="application/json").text
            == "[\n  0.5,\n  NaN,\n  -Infinity\n]"
        )
