"""Statuses and TorchServe's error JSON for exceptions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tsx_runtime.api.headers import JSON, NO_CACHE, Pair
from tsx_runtime.api.openai import speaks_openai
from tsx_runtime.errors import (
    MAX_PARSED_BYTES,
    MAX_REFUSAL_CHARS,
    InvalidToken,
    LoadFailed,
    MethodNotAllowed,
    PayloadTooLarge,
    TooManyRequests,
    TsxError,
    Unavailable,
    UnsupportedEncoding,
    error_body,
    read_error,
    shortened,
)
from tsx_runtime.wire import OPENAI_META, V2_META, content_type_of

NOT_FOUND = "Requested resource is not found, please refer to API document."
UNEXPECTED = (
    "The server failed unexpectedly; its log has the traceback under the x-request-id of this"
    " answer."
)

V2_PREFIX = "/v2/"  # paths of the Open Inference Protocol

logger = logging.getLogger("tsx.http")


def error_response(error: TsxError, path: str = "") -> tuple[int, tuple[Pair, ...], bytes]:
    """Return status, headers and body for an error, in the form of the path's protocol.

    Only a failed load shows the worker's traceback, because whoever registers a model needs it.
    """
    message = error.message
    if isinstance(error, LoadFailed) and error.traceback and error.traceback not in message:
        message = f"{message}\n{error.traceback}"
    convert = converter_for_path(path)
    if convert is to_openai_error:
        set_openai_status(error)
    body = error_body(error.status, error.type, message)
    return (
        error.status,
        (JSON, *_error_headers(error), *NO_CACHE),
        body if convert is None else convert(body),
    )


def converter_for_path(path: str) -> Callable[[bytes], bytes] | None:
    """Return the function that converts error JSON for the path's protocol; None for TorchServe."""
    if speaks_openai(path):
        return to_openai_error
    return to_v2_error if path.startswith(V2_PREFIX) else None


def converter_for_meta(meta: bytes) -> Callable[[bytes], bytes] | None:
    """Return `converter_for_path` for a request's meta."""
    if OPENAI_META in meta:
        return to_openai_error
    return to_v2_error if V2_META in meta else None


def to_v2_error(body: bytes) -> bytes:
    """Add the message as the field `error`, for clients of the Open Inference Protocol."""
    return _with_error(body, lambda error: error["message"])


def set_openai_status(error: TsxError) -> None:
    """Replace TorchServe's status for a wrong token by OpenAI's status 401."""
    if isinstance(error, InvalidToken) and error.status == InvalidToken.status:
        error.status = 401


def to_openai_error(body: bytes) -> bytes:
    """Add OpenAI's object `error`."""
    return _with_error(body, _openai_error)


def _with_error(body: bytes, value: Callable[[dict[str, Any]], Any]) -> bytes:
    """Add the field `error` to an error JSON; other bodies stay unchanged.

    A handler's body may contain anything. An error here would fail the other requests of its batch.
    """
    error = read_error(body)
    if list(error) == ["code", "type", "message"]:
        with suppress(ValueError, RecursionError):
            return (
                json.dumps(error | {"error": value(error)}, indent=2, ensure_ascii=False).encode(
                    errors="replace"
                )
                + b"\n"
            )
    return body


def is_event_stream(headers: bytes) -> bool:
    """Tell whether a header block announces server-sent events."""
    return content_type_of(headers).startswith("text/event-stream")


def error_event(message: str) -> bytes:
    """Return the last event of a stream that failed; `message` is a text or error JSON.

    Two newlines precede it, because the stream may have ended inside an event.
    """
    openai_error = None
    with suppress(ValueError, RecursionError, AttributeError):
        openai_error = (
            json.loads(to_openai_error(message.encode(errors="replace"))).get("error")
            if len(message) <= MAX_PARSED_BYTES
            else None
        )
    if not isinstance(openai_error, dict):
        openai_error = _openai_error(
            {"code": 500, "type": TsxError.type, "message": shortened(message, MAX_REFUSAL_CHARS)}
        )
    return b"\n\ndata: %b\n\n" % json.dumps({"error": openai_error}).encode()


def _openai_error(error: dict[str, Any]) -> dict[str, Any]:
    status, kind = error["code"], error["type"]
    code, param = _OPENAI_CODES.get(kind, (None, None))
    if status == 429:
        return {
            "message": error["message"],
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
    is_client = isinstance(status, int) and status < 500
    return {
        "message": error["message"],
        "type": "invalid_request_error" if is_client else "server_error",
        "param": param,
        "code": code,
    }


_OPENAI_CODES = {
    "InvalidKeyException": ("invalid_api_key", None),
    "ModelNotFoundException": ("model_not_found", "model"),
    "ModelVersionNotFoundException": ("model_not_found", "model"),
}


def to_tsx_error(error: BaseException, request_id: bytes) -> TsxError:
    """Return a TsxError unchanged, and for any other error one without details.

    The other error is a bug of the server, and logged with its traceback.
    """
    if isinstance(error, TsxError):
        return error
    extra = {"request_id": request_id.decode()}
    logger.error("request %s failed unexpectedly", extra["request_id"], exc_info=error, extra=extra)
    return TsxError(UNEXPECTED)


def _error_headers(error: TsxError) -> list[Pair]:
    pairs: list[Pair] = []
    if isinstance(error, InvalidToken) and error.status == 401:
        pairs.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed) and error.allowed:
        pairs.append((b"allow", ", ".join(error.allowed).encode()))
    if isinstance(error, UnsupportedEncoding):
        pairs.append((b"accept-encoding", b"gzip, deflate"))
    if isinstance(error, (Unavailable, TooManyRequests)) and error.retry_after is not None:
        pairs.append((b"retry-after", b"%d" % error.retry_after))
    # The remaining body must not be read as the next request.
    if isinstance(error, PayloadTooLarge) or error.more:
        pairs.append((b"connection", b"close"))
    return pairs
