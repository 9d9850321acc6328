"""Maps exceptions to a status and TorchServe's error JSON (contract 1.4)."""

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

V2 = "/v2/"  # the routes of the Open Inference Protocol

logger = logging.getLogger("tsx.http")


def fault(error: TsxError, path: str = "") -> tuple[int, tuple[Pair, ...], bytes]:
    """Status, headers and body, the latter in the form of the path's protocol.

    Only a failed load carries the worker's traceback: the person who registers a model needs it.
    """
    message = error.message
    if isinstance(error, LoadFailed) and error.traceback and error.traceback not in message:
        message = f"{message}\n{error.traceback}"
    form = form_of_path(path)
    if form is for_openai:
        as_openai(error)
    body = error_body(error.status, error.type, message)
    return error.status, (JSON, *_extra(error), *NO_CACHE), body if form is None else form(body)


def form_of_path(path: str) -> Callable[[bytes], bytes] | None:
    """What brings an error JSON into the form of the path's protocol; None where that is
    TorchServe's.
    """
    if speaks_openai(path):
        return for_openai
    return for_v2 if path.startswith(V2) else None


def form_of_meta(meta: bytes) -> Callable[[bytes], bytes] | None:
    """The same, of a request's meta."""
    if OPENAI_META in meta:
        return for_openai
    return for_v2 if V2_META in meta else None


def for_v2(body: bytes) -> bytes:
    """With the message in the field `error` as well, which is where clients of the Open Inference
    Protocol look.
    """
    return _with_error(body, lambda error: error["message"])


def as_openai(error: TsxError) -> None:
    """A wrong API key has a status of its own there, whatever TorchServe's is."""
    if isinstance(error, InvalidToken) and error.status == InvalidToken.status:
        error.status = 401


def for_openai(body: bytes) -> bytes:
    """With OpenAI's object `error` as well."""
    return _with_error(body, _openai_error)


def _with_error(body: bytes, value: Callable[[dict[str, Any]], Any]) -> bytes:
    """An error JSON with the field `error` as well.

    Any other body stays, such as what `worker.openai` writes.

    A handler writes what it likes, and what a client made it write: none of that may raise here,
    where a batch is being answered.
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
    """Whether a header block is that of server-sent events."""
    return content_type_of(headers).startswith("text/event-stream")


def error_event(why: str) -> bytes:
    """An error, in words or as an error JSON, as the last event of a stream that has begun, maybe
    within an event.
    """
    shown = None
    with suppress(ValueError, RecursionError, AttributeError):
        shown = (
            json.loads(for_openai(why.encode(errors="replace"))).get("error")
            if len(why) <= MAX_PARSED_BYTES
            else None
        )
    if not isinstance(shown, dict):
        shown = _openai_error(
            {"code": 500, "type": TsxError.type, "message": shortened(why, MAX_REFUSAL_CHARS)}
        )
    return b"\n\ndata: %b\n\n" % json.dumps({"error": shown}).encode()


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


def unexpected(error: BaseException, request_id: bytes) -> TsxError:
    """An exception that is a defect of the server: the traceback goes to the log, once, and stays
    out of the answer.
    """
    about = {"request_id": request_id.decode()}
    logger.error("request %s failed unexpectedly", about["request_id"], exc_info=error, extra=about)
    return TsxError(UNEXPECTED)


def _extra(error: TsxError) -> list[Pair]:
    pairs: list[Pair] = []
    if isinstance(error, InvalidToken) and error.status == 401:
        pairs.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed) and error.allowed:
        pairs.append((b"allow", ", ".join(error.allowed).encode()))
    if isinstance(error, UnsupportedEncoding):
        pairs.append((b"accept-encoding", b"gzip, deflate"))
    if isinstance(error, (Unavailable, TooManyRequests)) and error.retry_after is not None:
        pairs.append((b"retry-after", b"%d" % error.retry_after))
    if (
        isinstance(error, PayloadTooLarge) or error.more
    ):  # The rest of the body must not be read as the next request.
        pairs.append((b"connection", b"close"))
    return pairs
