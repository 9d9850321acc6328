"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from tsx_runtime.errors import TsxError, Unavailable
from tsx_runtime.worker.exceptions import InvalidInput, PredictionException
from tsx_runtime.worker.handler_api.context import Context


class RefusedField(InvalidInput):
    """A field of the request cannot be used as it is."""

    def __init__(self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.error_code = status


def answer(error: PredictionException | TsxError, context: Context) -> dict[str, Any]:
    """The error as an answer, and its status set. Of a stream that has begun, the server makes the last event of it."""
    if isinstance(error, TsxError):
        status, message = error.status, error.message
    else:
        status, message = error.error_code, error.message
    context.set_response_status(status, "", 0)
    if isinstance(error, Unavailable) and error.retry_after is not None:
        context.set_response_header(0, "retry-after", error.retry_after)
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": getattr(error, "param", None), "code": getattr(error, "code", None)}}
