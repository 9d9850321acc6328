"""The length of error texts, and the errors that a worker sends."""

from __future__ import annotations

import json

import pytest

from tsx_runtime.api.errors import to_v2_error
from tsx_runtime.errors import (
    BadRequest,
    InvalidModel,
    ModelNotFound,
    PredictionFailed,
    error_body,
    read_error,
)


@pytest.mark.parametrize(
    ("kind", "max_length"),
    [
        (BadRequest, 1000),
        (ModelNotFound, 1000),
        (InvalidModel, 16 << 10),
        (PredictionFailed, 64 << 10),
    ],
)
def test_an_error_text_is_cut_at_a_length(kind, max_length):
    assert kind("x" * max_length).message == "x" * max_length
    cut_error = kind("x" * (max_length + 1))
    assert cut_error.message == str(cut_error) == "x" * max_length + "... [1 characters left out]"


def test_the_servers_own_error_bodies_are_parsed():
    body = error_body(500, "InternalServerException", "é" * (64 << 10))
    assert read_error(body) == {
        "code": 500,
        "type": "InternalServerException",
        "message": "é" * (64 << 10),
    }
    assert json.loads(to_v2_error(body))["error"] == "é" * (64 << 10)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no image",
        b"[1]",
        b'{"message": 1}',
        b'{"message": ' + b"[" * 100_000,
        b'{"code": 1, "type": "a", "message": "' + b"x" * (256 << 10) + b'"}',
        b'{"a": [' + b"[]," * 2_000_000 + b"1]}",
    ],
)
def test_other_handler_bodies_are_not_parsed(body):
    assert read_error(body) == {}
    assert to_v2_error(body) == body
