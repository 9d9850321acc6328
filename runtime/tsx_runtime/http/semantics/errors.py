"""Maps exceptions to a status and TorchServe's error JSON (contract 1.4)."""

from __future__ import annotations

import json
import logging
from contextlib import suppress

from tsx_runtime.api.headers import JSON, NO_CACHE, Pair
from tsx_runtime.errors import (
    InvalidToken,
    LoadFailed,
    MethodNotAllowed,
    NoRoom,
    PayloadTooLarge,
    TooManyRequests,
    TsxError,
    Unavailable,
    error_body,
    read_error,
)

NOT_FOUND = "Requested resource is not found, please refer to API document."
UNEXPECTED = "The server failed unexpectedly; its log has the traceback under the x-request-id of this answer."

V2 = "/v2/"  # the routes of the Open Inference Protocol

logger = logging.getLogger("tsx.http")


def fault(error: TsxError, path: str = "") -> tuple[int, tuple[Pair, ...], bytes]:
    """Status, headers and body, the latter in the form of the path's protocol.

    Only a failed load carries the worker's traceback: the person who registers a model needs it.
    """
    message = error.message
    if isinstance(error, LoadFailed) and error.traceback and error.traceback not in message:
        message = f"{message}\n{error.traceback}"
    body = error_body(error.status, error.type, message)
    return error.status, (JSON, *_extra(error), *NO_CACHE), for_v2(body) if path.startswith(V2) else body


def for_v2(body: bytes) -> bytes:
    """An error JSON with the field `error` as well, which is where clients of the Open Inference Protocol look. Any other body stays.

    A handler writes what it likes, and what a client made it write: none of that may raise here, where a batch is being answered.
    """
    error = read_error(body)
    if list(error) == ["code", "type", "message"]:
        with suppress(ValueError, RecursionError):
            return json.dumps(error | {"error": error["message"]}, indent=2, ensure_ascii=False).encode() + b"\n"
    return body


def unexpected(error: BaseException, request_id: bytes) -> TsxError:
    """An exception that is a defect of the server: the traceback goes to the log, once, and stays out of the answer."""
    about = {"request_id": request_id.decode()}
    logger.error("request %s failed unexpectedly", about["request_id"], exc_info=error, extra=about)
    return TsxError(UNEXPECTED)


def _extra(error: TsxError) -> tuple[Pair, ...]:
    if isinstance(error, InvalidToken) and error.status == 401:
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, MethodNotAllowed) and error.allowed:
        return ((b"allow", ", ".join(error.allowed).encode()),)
    if isinstance(error, PayloadTooLarge):  # what is left of the body must not be read as the next request
        return ((b"connection", b"close"),)
    if isinstance(error, (Unavailable, TooManyRequests)) and error.retry_after is not None:
        retry = (b"retry-after", b"%d" % error.retry_after)
        return (retry, (b"connection", b"close")) if isinstance(error, NoRoom) and error.more else (retry,)
    return ()
