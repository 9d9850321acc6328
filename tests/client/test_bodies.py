"""Conversion of Python values to bodies and back, and of streams to pieces."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tsx_client import Event, InvalidAnswer, StreamInterrupted
from tsx_client.bodies import JSON_LENGTH_HEADER, Content, Signature, decode, encode
from tsx_client.streams import Pieces

IMAGE = Signature("image")
OUTPUT = {"name": "y", "datatype": "FP32", "shape": [3], "parameters": {"binary_data_size": 3}}
BROKEN_HEADS = [
    json.dumps({"outputs": [OUTPUT | change]}).encode()
    for change in (
        {},
        {"datatype": "BYTES"},
        {"datatype": [], "shape": "x"},
        {"datatype": "INT8", "parameters": {}, "data": [10**30]},
        {"parameters": {"binary_data_size": "3"}},
    )
]
TENSORS = Signature("json", {"x": ("FP32", [-1, 2]), "n": ("INT64", [-1])})


TEXT = "text/plain; charset=utf-8"


def test_a_value_becomes_a_body_with_a_content_type(tmp_path: Path) -> None:
    file = tmp_path / "7.png"
    file.write_bytes(b"png")
    for value, body, kind in (
        (b"x", b"x", "application/octet-stream"),
        ("text", b"text", TEXT),
        ({"a": [1]}, b'{"a": [1]}', "application/json"),
    ):
        assert encode(Signature(), value, {}) == Content.of(body, kind)
    assert encode(Signature(), None, {}) == Content()
    for image in (file, file.open("rb"), str(file)):
        assert encode(IMAGE, None, {"image": image}) == Content.of(b"png", "image/png")
    image_body = encode(IMAGE, Image.new("L", (2, 3)), {})
    assert image_body.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(image_body.body)).size == (2, 3)
    for signature, name in (("text", "text"), ("json", "data")):
        assert encode(Signature(signature), None, {name: "hi"}) == Content.of(b"hi", TEXT)


def test_named_values_become_json_or_a_form() -> None:
    chat = encode(Signature("chat"), None, {"inputs": "a", "parameters": {}})
    assert chat.body == b'{"inputs": "a", "parameters": {}}'
    body = encode(Signature(), None, {"a": 1, "b": [2]})
    assert body == Content.of(b'{"a": 1, "b": [2]}', "application/json")
    form = encode(Signature(), None, {"file": b"\0", "note": "n", "count": 2})
    assert form.files == {
        "file": ("file", b"\0", "application/octet-stream"),
        "note": (None, b"n", TEXT),
        "count": (None, b"2", TEXT),
    }


def test_values_for_a_signature_become_json_with_files_as_base64_and_arrays_as_lists() -> None:
    schema = {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"data": {}, "rows": {}}}}}
    signature = Signature.of({"signature": {"input": schema}, "parameters": {"input": "json"}})
    content = encode(signature, None, {"data": b"\0", "rows": [np.array([1])]})
    assert content == Content.of(b'{"data": "AA==", "rows": [[1]]}', "application/json")
    assert encode(signature, None, {"data": "a"}).body == b'{"data": "a"}'
    assert encode(signature, None, {"rows": np.array([1])}).is_tensors
    with pytest.raises(TypeError, match="Values of object cannot be sent as JSON"):
        encode(signature, None, {"data": object()})


def test_an_unknown_input_name_is_an_error() -> None:
    with pytest.raises(TypeError, match="takes image, and was given text"):
        encode(IMAGE, None, {"text": "x"})
    with pytest.raises(TypeError, match="not both"):
        encode(IMAGE, b"x", {"image": b"x"})


def test_arrays_become_tensors_of_the_models_type() -> None:
    content = encode(TENSORS, None, {"x": np.array([[1, 2.5]]), "n": [3]})
    length = int(content.headers[JSON_LENGTH_HEADER])
    head = json.loads(content.body[:length])
    assert content.is_tensors
    assert head["inputs"] == [
        {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
        {"name": "n", "shape": [1], "datatype": "INT64", "data": [3]},
    ]
    assert np.frombuffer(content.body[length:], "<f4").tolist() == [1, 2.5]
    assert json.loads(encode(TENSORS, None, {"x": [[1, 2]]}).body)["inputs"][0]["shape"] == [1, 2]
    big_endian = encode(Signature(), np.array([1, 2], ">i4"), {})
    assert big_endian.body.endswith(b"\1\0\0\0\2\0\0\0")
    with pytest.raises(TypeError, match="cannot be sent"):
        encode(Signature(), np.array([1j]), {})


def test_responses_become_values() -> None:
    def of(body: bytes, kind: str = "") -> Any:
        return decode({"content-type": kind}, body)

    assert of(b'{"a": 1}', "application/json") == {"a": 1}
    assert of("é".encode(), "text/plain; charset=utf-8") == "é"
    assert of(b"\x89PNG", "image/png") == b"\x89PNG"
    assert of(b'[{"a": 1}]') == [{"a": 1}]
    assert of(b"{broken") == b"{broken"
    assert of(b"[" * 100_000) == b"[" * 100_000
    tensors: list[dict[str, Any]] = [
        {"name": "a", "datatype": "INT32", "shape": [2, 1], "parameters": {"binary_data_size": 8}},
        {"name": "b", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 11}},
        {"name": "c", "datatype": "FP64", "shape": [1], "data": [0.5]},
        {"name": "d", "datatype": "BYTES", "shape": [1], "data": ["x"]},
    ]
    head = json.dumps({"outputs": tensors}).encode()
    raw = b"\1\0\0\0\2\0\0\0" + b"\1\0\0\0a" + b"\2\0\0\0bc"
    arrays = decode({JSON_LENGTH_HEADER: str(len(head))}, head + raw)
    assert {name: np.asarray(value).tolist() for name, value in arrays.items()} == {
        "a": [[1], [2]],
        "b": [b"a", b"bc"],
        "c": [0.5],
        "d": ["x"],
    }


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_server_sent_events_are_parsed_from_chunks_of_any_size(size: int) -> None:
    text = ": hi\r\n\r\ndata: é\u2028\r\nevent: x\r\nid: 4\r\n\r\ndata:two\ndata: three\n\ndata: [DONE]\n\ndata: late\n\n".encode()
    pieces = Pieces("text/event-stream; charset=utf-8")
    events = [
        event
        for position in range(0, len(text), size)
        for event in pieces.feed(text[position : position + size])
    ]
    events += pieces.feed(b"", last=True)
    assert events == [Event("é\u2028", "x", "4"), Event("two\nthree")]
    assert Event('{"a": 1}').json() == {"a": 1}


def test_an_error_event_ends_the_stream() -> None:
    pieces = Pieces("text/event-stream").feed(
        b'data: a\n\ndata: {"error": {"message": "the worker died"}}\n\n'
    )
    assert next(pieces) == Event("a")
    with pytest.raises(StreamInterrupted, match="the worker died"):
        next(pieces)


@pytest.mark.parametrize(
    "data", ['{"error": null, "token": "a"}', '{"error": "", "token": "a"}', '{"error" is no JSON']
)
def test_an_event_without_an_error_is_a_piece(data: str) -> None:
    assert [*Pieces("text/event-stream").feed(f"data: {data}\n\ndata: b\n\n".encode())] == [
        Event(data),
        Event("b"),
    ]


def test_text_is_not_split_within_a_character() -> None:
    text = Pieces("text/plain")
    euro = "€".encode()
    assert [*text.feed(euro[:1]), *text.feed(euro[1:] + b"a"), *text.feed(b"", last=True)] == ["€a"]
    assert [*Pieces("").feed(b"\xff"), *Pieces("").feed(b"", last=True)] == [b"\xff"]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"content-type": "application/json"}, b"<html>"),
        ({"content-type": "application/json"}, b"[" * 100_000),
        ({"content-type": "application/json"}, b'"\xff"'),
        ({"content-type": "text/plain"}, b"\xff"),
        ({JSON_LENGTH_HEADER: "many"}, b"{}"),
        ({JSON_LENGTH_HEADER: "2"}, b"{}"),
        ({JSON_LENGTH_HEADER: "2"}, b"[]"),
        ({JSON_LENGTH_HEADER: "15"}, b'{"outputs":[1]}'),
        *(({JSON_LENGTH_HEADER: str(len(head))}, head + b"\x09\0\0") for head in BROKEN_HEADS),
    ],
)
def test_a_malformed_response_is_invalid(headers: dict[str, str], body: bytes) -> None:
    with pytest.raises(InvalidAnswer, match="cannot be read"):
        decode(headers, body)


def test_an_event_that_is_not_json_is_invalid() -> None:
    for text in ("{", "[" * 100_000):
        with pytest.raises(InvalidAnswer):
            Event(text).json()
