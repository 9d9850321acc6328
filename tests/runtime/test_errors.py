"""The length of errors, and the errors that a worker sends."""

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
    ("kind", "longest"),
    [
        (BadRequest, 1000),
        (ModelNotFound, 1000),
        (InvalidModel, 16 << 10),
        (PredictionFailed, 64 << 10),
    ],
)
def test_an_error_keeps_its_text_up_to_a_length(kind, longest):
    assert kind("x" * longest).message == "x" * longest
    cut = kind("x" * (longest + 1))
    assert cut.message == str(cut) == "x" * longest + "... [1 characters left out]"


def test_an_error_of_the_servers_own_is_read():
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
def test_other_bodies_of_a_handler_are_not_read(body):
    assert read_error(body) == {}
    assert to_v2_error(body) == body
