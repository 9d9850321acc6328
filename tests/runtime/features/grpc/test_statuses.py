"""The gRPC status and details of each error, and headers as metadata."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from tsx_runtime.errors import (
    MAX_PARSED_BYTES,
    BadRequest,
    CannotRemoveDefault,
    DeadlinePassed,
    InvalidToken,
    LoadFailed,
    MethodNotAllowed,
    OutOfResources,
    PredictionFailed,
    QueueFull,
    TsxError,
    error_body,
)
from tsx_runtime.features.grpc.messages import block_to_metadata, metadata_to_headers
from tsx_runtime.features.grpc.statuses import (
    MAX_DETAILS_CHARS,
    code_for_status,
    refusal,
    worker_refusal,
)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, StatusCode.INVALID_ARGUMENT),
        (401, StatusCode.UNAUTHENTICATED),
        (403, StatusCode.PERMISSION_DENIED),
        (404, StatusCode.NOT_FOUND),
        (405, StatusCode.FAILED_PRECONDITION),
        (408, StatusCode.FAILED_PRECONDITION),
        (409, StatusCode.ABORTED),
        (413, StatusCode.RESOURCE_EXHAUSTED),
        (422, StatusCode.INVALID_ARGUMENT),
        (429, StatusCode.RESOURCE_EXHAUSTED),
        (499, StatusCode.CANCELLED),
        (500, StatusCode.INTERNAL),
        (501, StatusCode.UNIMPLEMENTED),
        (503, StatusCode.UNAVAILABLE),
        (504, StatusCode.DEADLINE_EXCEEDED),
        (507, StatusCode.INTERNAL),
    ],
)
def test_an_http_status_maps_to_a_grpc_code(status: int, code: StatusCode) -> None:
    assert code_for_status(status) is code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadRequest("x"), StatusCode.INVALID_ARGUMENT),
        (InvalidToken("x"), StatusCode.PERMISSION_DENIED),
        (CannotRemoveDefault("x"), StatusCode.PERMISSION_DENIED),
        (QueueFull("x"), StatusCode.UNAVAILABLE),
        (QueueFull("x", status=429), StatusCode.RESOURCE_EXHAUSTED),
        (OutOfResources("x"), StatusCode.INTERNAL),
        (TsxError("x"), StatusCode.INTERNAL),
    ],
)
def test_an_error_maps_to_a_grpc_code_by_status_or_class(error: TsxError, code: StatusCode) -> None:
    assert refusal(error).code is code


def test_the_error_of_a_disabled_model_api_says_so() -> None:
    text = "Model API disabled\norg.pytorch.serve.archive.model.ModelException"
    assert refusal(MethodNotAllowed()) == (StatusCode.PERMISSION_DENIED, text, (), 405)


def test_a_refusal_has_retry_after_unless_the_deadline_passed() -> None:
    assert refusal(QueueFull("full", retry_after=3)).metadata == (
        ("grpc-retry-pushback-ms", "3000"),
        ("retry-after", "3"),
    )
    assert refusal(DeadlinePassed("late", retry_after=3)).metadata == ()


def test_a_long_traceback_is_cut_to_fit_the_trailers() -> None:
    details = refusal(LoadFailed("cannot load", traceback="line\n" * 9000 + "the end")).details
    assert len(details) < MAX_DETAILS_CHARS + 50
    assert details.startswith("cannot load")
    assert details.endswith("the end\norg.pytorch.serve.http.InternalServerException")


def test_only_the_workers_own_error_json_is_parsed_as_an_error() -> None:
    assert worker_refusal(503, error_body(503, "InternalServerException", "Prediction failed"))
    for body in (
        b"text",
        b"{}",
        b"[]",
        b"\xff",
        b'{"code": 503, "message": "x"}',
        error_body(500, "X", "of another status"),
        b"[" * 100_000,
        # Parsing a body of this length would block the event loop.
        error_body(503, "X", "x" * MAX_PARSED_BYTES),
    ):
        assert worker_refusal(503, body) is None


def test_validation_errors_end_a_call() -> None:
    body = b'{"detail": [{"loc": ["body", "text"], "type": "missing"}]}'
    invalid = worker_refusal(422, body)
    assert invalid is not None
    assert (invalid.code, invalid.details) == (StatusCode.INVALID_ARGUMENT, body.decode())
    assert worker_refusal(422, b'{"detail": "of the handler"}') is None


def test_metadata_become_headers_except_framing_and_multiline_ones() -> None:
    metadata = [
        ("x-a", "1"),
        ("grpc-timeout", "1S"),
        ("content-type", "application/grpc"),
        ("inference-header-content-length", "9"),
        ("b-bin", b"\0"),
        ("x-b", "1\r\n:workflow-node: last"),
        ("x-c", "1\n2"),
        ("x-d", "\u00e9"),
        ("x-d-bin", b"\r\n"),
    ]
    assert metadata_to_headers(metadata) == [
        (b"x-a", b"1"),
        (b"b-bin", b"AA=="),
        (b"x-d", b"\xe9"),
        (b"x-d-bin", b"DQo="),
    ]


def test_valid_handler_headers_become_metadata() -> None:
    assert block_to_metadata(b"") == ()
    assert block_to_metadata(
        b"X-A: 1\r\nContent-Type: text/csv\r\nx!y: 2\r\ngrpc-status: 0\r\nconnection: close\r\n"
    ) == (("x-a", "1"),)
    with pytest.raises(PredictionFailed):
        block_to_metadata(b"bad name: 1\r\n")
