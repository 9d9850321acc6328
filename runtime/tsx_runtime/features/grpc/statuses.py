"""The gRPC status codes and details of errors, as in TorchServe."""

from __future__ import annotations

from typing import NamedTuple

from grpc import StatusCode

from tsx_runtime.errors import (
    DeadlinePassed,
    InvalidToken,
    LoadFailed,
    MethodNotAllowed,
    TooManyRequests,
    TsxError,
    Unavailable,
    read_error,
    shortened,
)

MODEL_API_DISABLED = "Model API disabled"
STATUS_KEY = "x-http-status"  # metadata with the handler's HTTP status, if it is not 200
MAX_DETAILS_CHARS = 4000  # more would exceed the 8 KiB of trailers that clients accept
_TAIL_CHARS = 2500  # length of the end of longer details that is kept: a traceback's message

_ARCHIVE_ERRORS = {
    "ModelException",
    "ModelNotFoundException",
    "ModelVersionNotFoundException",
    "InvalidModelException",
}

_CODES = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    409: StatusCode.ABORTED,
    413: StatusCode.RESOURCE_EXHAUSTED,
    422: StatusCode.INVALID_ARGUMENT,
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}


class Refusal(NamedTuple):
    """The status that ends a call without a response."""

    code: StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...] = ()
    status: int = 500  # REST's status, which is counted


class CallRefused(Exception):
    """An error that ends the call with a status."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.details)
        self.refusal = refusal


def code_for_status(status: int) -> StatusCode:
    """Return the gRPC code for an HTTP status of 400 or more."""
    return _CODES.get(status) or (
        StatusCode.FAILED_PRECONDITION if status < 500 else StatusCode.INTERNAL
    )


def refusal(error: TsxError) -> Refusal:
    if isinstance(error, MethodNotAllowed):
        return Refusal(
            StatusCode.PERMISSION_DENIED,
            details_with_type(MODEL_API_DISABLED, "ModelException"),
            status=error.status,
        )
    details = error.message
    if isinstance(error, LoadFailed) and error.traceback and error.traceback not in details:
        details = f"{details}\n{error.traceback}"
    return Refusal(
        _code_for_error(error),
        details_with_type(details, error.type),
        _retry_metadata(error),
        error.status,
    )


def worker_refusal(status: int, body: bytes) -> Refusal | None:
    """Return the status for a worker's error JSON (`errors.error_body`), or the errors of a field.

    None is returned for a response that the handler itself has written.
    """
    if status == 422 and body.startswith(b'{"detail": ['):
        return Refusal(code_for_status(status), details_text(body.decode()), status=status)
    error = read_error(body)
    if len(error) == 3 and error.get("code") == status and isinstance(error.get("type"), str):
        return Refusal(
            code_for_status(status),
            details_with_type(error["message"], error["type"]),
            status=status,
        )
    return None


def details_with_type(message: str, type: str) -> str:
    """Return a message with the class name on its last line, as TorchServe's clients expect."""
    package = "archive.model" if type in _ARCHIVE_ERRORS else "http"
    return details_text(f"{message}\norg.pytorch.serve.{package}.{type}")


def details_text(text: str) -> str:
    """Return a text without lone surrogates that is short enough for a call's details."""
    # A lone surrogate cannot be encoded in UTF-8.
    return shortened(
        text.encode(errors="backslashreplace").decode(), MAX_DETAILS_CHARS, tail=_TAIL_CHARS
    )


def _code_for_error(error: TsxError) -> StatusCode:
    if isinstance(error, InvalidToken):
        return StatusCode.PERMISSION_DENIED
    return (
        StatusCode.DEADLINE_EXCEEDED
        if isinstance(error, DeadlinePassed)
        else code_for_status(error.status)
    )


def _retry_metadata(error: TsxError) -> tuple[tuple[str, str], ...]:
    """Return metadata with the time until a retry: first for gRPC clients, then for people."""
    if (
        isinstance(error, (Unavailable, TooManyRequests))
        and error.retry_after is not None
        and not isinstance(error, DeadlinePassed)
    ):
        return (
            ("grpc-retry-pushback-ms", str(error.retry_after * 1000)),
            ("retry-after", str(error.retry_after)),
        )
    return ()
