"""Maps errors to gRPC statuses, as TorchServe does (contract section 2)."""

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
# metadata: what the handler made of the request, as HTTP would say it, where it is not 200
STATUS = "x-http-status"
LONGEST = 4000  # characters of a description: clients take 8 KiB of trailers
_TAIL = 2500  # of them from its end, where a traceback says what happened

_OF_ARCHIVES = {
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
    """The end of a call without an answer."""

    code: StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...] = ()
    status: int = 500  # what REST would answer: as that it is counted


class CallRefused(Exception):
    """The call ends with this status."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.details)
        self.refusal = refusal


def code_of(status: int) -> StatusCode:
    """What an HTTP status from 400 on is in gRPC."""
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
    """What a worker answered that is no answer of the handler's, but why there is none: the error
    JSON of `errors.error_body`.
    """
    error = read_error(body)
    if len(error) == 3 and error.get("code") == status and isinstance(error.get("type"), str):
        return Refusal(code_of(status), described(error["message"], error["type"]), status=status)
    return None


def described(message: str, type: str) -> str:
    """TorchServe's clients find the name of its class on the last line."""
    package = "archive.model" if type in _OF_ARCHIVES else "http"
    return details_text(f"{message}\norg.pytorch.serve.{package}.{type}")


def details_text(text: str) -> str:
    """The text as a call's details may carry it."""
    return shortened(
        text.encode(errors="backslashreplace").decode(), LONGEST, tail=_TAIL
    )  # a lone surrogate has no bytes in UTF-8


def _code(error: TsxError) -> StatusCode:
    if isinstance(error, InvalidToken):
        return StatusCode.PERMISSION_DENIED
    return (
        StatusCode.DEADLINE_EXCEEDED if isinstance(error, DeadlinePassed) else code_of(error.status)
    )


def _retry(error: TsxError) -> tuple[tuple[str, str], ...]:
    """Clients that retry by themselves heed the first name, people the second."""
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
