"""Responses, made from the results and errors of handlers."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.served_model import a_context
from tsx_runtime.errors import BadRequest, PredictionFailed, Unavailable
from tsx_runtime.worker.codecs.json_text import to_compact_json, to_json
from tsx_runtime.worker.codecs.responses import (
    check_results,
    encode_answers,
    encode_body,
    failure,
    is_device_lost,
    is_out_of_memory,
)
from tsx_runtime.worker.exceptions import BadRows, EngineDied, InvalidInput, PredictionException


@pytest.mark.parametrize(
    ("value", "body"),
    [
        (b"\x00raw", b"\x00raw"),
        (bytearray(b"raw"), b"raw"),
        ("grün", "grün".encode()),
        ({"a": [1, None]}, b'{\n  "a": [\n    1,\n    null\n  ]\n}'),
        ([], b"[]"),
        (None, b"null"),
        (1.5, b"1.5"),
        (True, b"true"),
    ],
)
def test_a_value_is_encoded_by_its_type(value: Any, body: bytes) -> None:
    assert bytes(encode_body(value)) == body


def test_a_tensor_is_encoded_with_torch_save() -> None:
    tensor = torch.arange(6).reshape(2, 3)
    assert torch.equal(
        torch.load(io.BytesIO(bytes(encode_body(tensor))), weights_only=True), tensor
    )


def circular_list() -> list[Any]:
    circular_error: list[Any] = []
    circular_error.append(circular_error)
    return circular_error


@pytest.mark.parametrize(
    ("value", "expected_text"),
    [(object(), "object"), ({1, 2}, "set"), ({"a": b"raw"}, "dict"), (circular_list(), "list")],
)
def test_the_error_names_a_value_that_cannot_be_sent(value: Any, expected_text: str) -> None:
    with pytest.raises(
        PredictionFailed,
        match=rf"^Unsupported model output data type\. The handler returned {expected_text}",
    ):
        encode_body(value)


class Mute(RuntimeError):
    def __str__(self) -> str:
        raise SystemExit(1)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("boom"), 500, "Prediction failed: ValueError: boom"),
        (KeyError(), 500, "Prediction failed: KeyError"),
        (SystemExit(3), 500, "Prediction failed: SystemExit: 3"),
        (MemoryError(), 507, "Out of resources: MemoryError"),
        (
            RuntimeError("CUDA out of memory. Tried"),
            507,
            "Out of resources: RuntimeError: CUDA out of memory. Tried",
        ),
        (PredictionException("no such user", 404), 404, "no such user"),
        (PredictionException("plain"), 500, "plain"),
        (PredictionException("not a status", 12), 500, "not a status"),
        (Mute(), 500, "Prediction failed: Mute: (no message: SystemExit in its __str__)"),
        (FileNotFoundError("no \udcff"), 500, "Prediction failed: FileNotFoundError: no \\udcff"),
        (PredictionException("no \udcff", 422), 422, "no ?"),
    ],
)
def test_an_exception_determines_the_status_and_message(
    error: BaseException, status: int, message: str
) -> None:
    code, headers, body = failure(error)
    assert (code, headers) == (status, b"content-type: application/json\r\n")
    assert json.loads(bytes(body)) == {
        "code": status,
        "type": "InternalServerException",
        "message": message,
    }


def test_only_fatal_cuda_errors_count_as_a_lost_device() -> None:
    assert is_device_lost(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_device_lost(RuntimeError("CUDA error: out of memory"))
    assert not is_device_lost(RuntimeError("CUDA out of memory. Tried to allocate"))
    assert not is_device_lost(ValueError("CUDA error"))


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_out_of_memory_is_recognized_also_as_a_cause(error: Exception) -> None:
    outer_error, circular_error = RuntimeError("the model cannot be loaded"), ValueError()
    outer_error.__cause__ = error
    circular_error.__cause__ = circular_error
    assert is_out_of_memory(outer_error)
    assert not is_out_of_memory(circular_error)


def test_a_result_of_the_wrong_shape_is_explained() -> None:
    assert check_results(["a"], 1, "h.py") is None
    assert "expect: 2, got: 1" in str(check_results(["a"], 2, "h.py"))
    assert "h.py returned tuple" in str(check_results(("a",), 1, "h.py"))


json_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.booleans() | st.none() | st.floats()
nested = st.recursive(
    json_values,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner),
)


@given(st.lists(json_values) | st.dictionaries(keys, json_values) | nested)
def test_to_json_equals_json_dumps(value: Any) -> None:
    assert to_json(value, "literal") == json.dumps(value, indent=2)


@given(nested, st.sampled_from(["null", "string"]))
def test_answers_never_contain_nan_or_infinity_literals(value: Any, nan: str) -> None:
    for text in (to_json(value, nan), to_compact_json(value, nan)):
        json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("nan", "expected_text"),
    [
        ("null", [0.5, None, None, None]),
        ("string", [0.5, "NaN", "Infinity", "-Infinity"]),
        ("literal", "[0.5, NaN, Infinity, -Infinity]"),
    ],
)
def test_nan_and_infinities_are_encoded_as_the_setting_says(
    nan: str, expected_text: object
) -> None:
    values = [0.5, math.nan, math.inf, -math.inf]
    for value in (
        values,
        {"deep": [values]},
        numpy.array(values, "float32"),
        {"a": torch.tensor(values)},
        [numpy.float32(number) for number in values],
    ):
        text = to_compact_json(value, nan)
        assert (
            expected_text if isinstance(expected_text, str) else json.dumps(expected_text)
        ) in text
        assert json.loads(to_json(value, nan), parse_constant=str) == json.loads(
            text, parse_constant=str
        )


@pytest.mark.parametrize(
    ("value", "python_value"),
    [
        (numpy.float32(0.5), 0.5),
        ([numpy.int64(3), numpy.bool_(True), numpy.float64(0.1)], [3, True, 0.1]),
        ({numpy.int64(3): {"score": numpy.float16(0.5)}}, {"3": {"score": 0.5}}),
        (numpy.eye(2), [[1.0, 0.0], [0.0, 1.0]]),
        (
            {"scores": torch.tensor([1, 2]), "one": torch.tensor(0.5)},
            {"scores": [1, 2], "one": 0.5},
        ),
    ],
)
def test_numpy_and_torch_scalars_are_encoded_as_numbers(value: Any, python_value: Any) -> None:
    assert to_json(value) == json.dumps(python_value, indent=2)
    assert to_compact_json(value) == json.dumps(python_value)


def test_json_answers_get_a_content_type_unless_the_handler_sets_one() -> None:
    context = a_context()
    context.begin(["a\r\n\r\n"] * 5)
    context.set_response_content_type(1, "application/problem+json")
    context.set_response_header(2, "X-Mine", "1")
    answers = encode_answers([{"a": 1}, {"a": 1}, [1], "text", b"bytes"], context, 1000)
    assert [bytes(headers).decode().replace("\r\n", ";") for _, headers, _ in answers] == [
        "content-type: application/json;",
        "content-type: application/problem+json;",
        "X-Mine: 1;content-type: application/json;",
        "",
        "",
    ]


def test_content_types_are_guessed_if_the_platform_requires_them() -> None:
    context = a_context()
    context.guess_content_type = True
    context.begin(["a\r\n\r\n"] * 6)
    context.set_response_content_type(0, "image/png")
    context.set_response_header(1, "X-Mine", "1")
    answers = encode_answers(
        [b"png", "text", '{"a": 1}', b"\xff", {"a": 1}, bytearray(b"text")], context, 1000
    )
    types = [
        bytes(headers).decode().partition("content-type: ")[2].strip() for _, headers, _ in answers
    ]
    text = "text/plain; charset=utf-8"
    assert types == [
        "image/png",
        text,
        "application/json",
        "application/octet-stream",
        "application/json",
        text,
    ]
    assert context.add_content_type(b"", b'"a"') == b"content-type: application/json\r\n"
    # A part of a stream is never JSON, since the next part may make the whole invalid.
    assert context.add_content_type(b"", b'"a"', part=True) == f"content-type: {text}\r\n".encode()


def test_an_answer_that_cannot_be_sent_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    context = a_context()
    context.begin(["a\r\n\r\n", "b\r\n\r\n"])
    encode_answers([{1, 2}, "x" * 2000], context, 1000)
    first, second = caplog.messages
    assert ("request a" in first, "returned set" in first) == (True, True)
    assert ("request b" in second, "2000 bytes" in second) == (True, True)


def test_a_temporary_refusal_has_a_retry_after_header() -> None:
    _, headers, _ = failure(Unavailable("full", retry_after=7))
    assert headers == b"content-type: application/json\r\nretry-after: 7\r\n"
    assert failure(Unavailable("gone"))[1] == b"content-type: application/json\r\n"


def test_an_ended_engine_counts_as_a_lost_device() -> None:
    assert is_device_lost(EngineDied("the engine has ended"))
    assert failure(EngineDied("the engine has ended"))[0] == 500


def test_handler_errors_have_the_status_of_the_setting() -> None:
    context = a_context()
    context.begin(["a\r\n\r\n"])
    assert encode_answers([{1, 2}], context, 1000, 503)[0][0] == 503
    assert [
        failure(error, 503)[0]
        for error in (ValueError(), PredictionFailed("x"), MemoryError(), BadRequest("x"))
    ] == [
        503,
        503,
        507,
        400,
    ]


@pytest.mark.parametrize("error", [InvalidInput("no such city"), BadRows({0: "no such city"})])
def test_an_invalid_input_is_a_client_error(error: Exception) -> None:
    code, _, body = failure(error, 503)
    assert (code, json.loads(bytes(body))) == (
        400,
        {"code": 400, "type": "BadRequestException", "message": "no such city"},
    )


def test_a_very_long_exception_text_is_shortened() -> None:
    message = json.loads(bytes(failure(ValueError("a" * 3_000_000 + "b"))[2]))["message"]
    assert len(message) < 10_000
    assert message.startswith("Prediction failed: ValueError: aaa")
    assert message.endswith("ab")
    assert "2992001 characters left out" in message
