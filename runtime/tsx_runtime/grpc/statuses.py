"""gRPC statuses for errors, as TorchServe chooses them."""

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
STATUS_KEY = "x-http-status"  # metadata: the handler's HTTP status if it is not 200
MAX_DETAILS_CHARS = 4000  # Clients accept 8 KiB of trailers.
_TAIL_CHARS = 2500  # kept end of longer details, where a traceback has its message

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
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}


class Refusal(NamedTuple):
    """The end of a call without a response."""

    code: StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...] = ()
    status: int = 500  # REST's status, for the counters


class CallRefused(Exception):
    """An error that ends the call with a status."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.details)
        self.refusal = refusal


def code_of(status: int) -> StatusCode:
    """Return the gRPC code for an HTTP status of 400 or more."""
    return _CODES.get(status) or (
        StatusCode.FAILED_PRECONDITION if status < 500 else StatusCode.INTERNAL
    )


def refusal(error: TsxError) -> Refusal:
    if isinstance(error, MethodNotAllowed):
        return Refusal(
            StatusCode.PERMISSION_DENIED,
            described(MODEL_API_DISABLED, "ModelException"),
            status=error.status,
        )
    details = error.message
    if isinstance(error, LoadFailed) and error.traceback and error.traceback not in details:
        details = f"{details}\n{error.traceback}"
    return Refusal(_code(error), described(details, error.type), _retry(error), error.status)


def worker_refusal(status: int, body: bytes) -> Refusal | None:
    """Return the status for an error JSON of a worker (`errors.error_body`).

    A handler's own response is no such JSON, and yields None.
    """
    error = read_error(body)
    if len(error) == 3 and error.get("code") == status and isinstance(error.get("type"), str):
        return Refusal(code_of(status), described(error["message"], error["type"]), status=status)
    return None


def described(message: str, type: str) -> str:
    """Return a message with the class name on its last line, as TorchServe's clients expect."""
    package = "archive.model" if type in _ARCHIVE_ERRORS else "http"
    return details_text(f"{message}\norg.pytorch.serve.{package}.{type}")


def details_text(text: str) -> str:
    """Return a text that fits into a call's details."""
    # A lone surrogate cannot be encoded in UTF-8.
    return shortened(
        text.encode(errors="backslashreplace").decode(), MAX_DETAILS_CHARS, tail=_TAIL_CHARS
    )


def _code(error: TsxError) -> StatusCode:
    if isinstance(error, InvalidToken):
        return StatusCode.PERMISSION_DENIED
    return (
        StatusCode.DEADLINE_EXCEEDED if isinstance(error, DeadlinePassed) else code_of(error.status)
    )


def _retry(error: TsxError) -> tuple[tuple[str, str], ...]:
    """Return metadata for a retry: the first name is for programs, the second for people."""
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
