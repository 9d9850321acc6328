"""Errors on their way to a client: one mapping from an exception to a status and TorchServe's error JSON (contract 1.4)."""

from __future__ import annotations

import json
import logging
import reprlib
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tsx_runtime.errors import (
    BadRequest,
    InvalidToken,
    LoadFailed,
    MethodNotAllowed,
    PayloadTooLarge,
    ResourceNotFound,
    TsxError,
    Unavailable,
    error_body,
)
from tsx_runtime.http.asgi import JSON, NO_CACHE, Message, Pair, Receive, Scope, Send, send_last

NOT_FOUND = "Requested resource is not found, please refer to API document."
NOT_ALLOWED = "Requested method is not allowed, please refer to API document."
UNEXPECTED = "The server failed unexpectedly; its log has the traceback under the x-request-id of this answer."

_SHOWN = reprlib.Repr()  # of a client's value as much as a person reads, however large it is, and however deeply nested
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 200

V2 = "/v2/"  # the routes of the Open Inference Protocol

logger = logging.getLogger("tsx.http")


def fault(error: TsxError) -> tuple[int, tuple[Pair, ...], bytes]:
    """Status, headers and body. Only a failed load carries the worker's traceback: whoever registers a model needs it."""
    message = error.message
    if isinstance(error, LoadFailed) and error.traceback and error.traceback not in message:
        message = f"{message}\n{error.traceback}"
    return error.status, (JSON, *_extra(error), *NO_CACHE), error_body(error.status, error.type, message)


def for_v2(body: bytes) -> bytes:
    """An error JSON with the field `error` as well, which is where clients of the Open Inference Protocol look. Any other body stays.

    A handler writes what it likes, and what a client made it write: none of that may raise here, where a batch is being answered.
    """
    try:
        told = json.loads(body)
        if list(told) == ["code", "type", "message"]:
            return json.dumps(told | {"error": told["message"]}, indent=2, ensure_ascii=False).encode() + b"\n"
    except (ValueError, TypeError, RecursionError):
        pass
    return body


def unexpected(error: BaseException, request_id: bytes) -> TsxError:
    """What nobody foresaw: the traceback goes to the log, once, and stays out of the answer."""
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
    if isinstance(error, Unavailable) and error.retry_after is not None:
        return ((b"retry-after", b"%d" % error.retry_after),)
    return ()


class EarlyResponse(Response):
    """Goes out while its request's body is still coming, of which the rest is thrown away."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_early(message: Message) -> None:
            if message["type"] == "http.response.body":
                await send_last(send, message["body"], receive)
            else:
                await send(message)

        await super().__call__(scope, receive, send_early)


def install(app: FastAPI) -> None:
    """Nothing but the error JSON leaves the app, whoever raised."""

    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, TsxError)
        return _response(error, path=request.url.path)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _response(from_http(error), error.headers, request.url.path)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _response(from_validation(error.errors()))

    async def on_unexpected(request: Request, error: Exception) -> Response:
        return _response(TsxError(UNEXPECTED))  # the framework raises it again afterwards, and the app logs it

    app.add_exception_handler(Exception, on_unexpected)
    app.add_exception_handler(TsxError, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)


def from_http(error: HTTPException) -> TsxError:
    """The framework's own refusals."""
    if error.status_code == 404:
        return ResourceNotFound(NOT_FOUND)
    if error.status_code == 405:
        return MethodNotAllowed(NOT_ALLOWED)
    return BadRequest(str(error.detail))


def from_validation(problems: Any) -> BadRequest:
    """Name the parameter and its value. (TorchServe takes the default for a number that does not parse.)"""
    texts = []
    for problem in problems:
        name = ".".join(str(part) for part in problem["loc"] if part not in ("query", "body", "path"))
        texts.append(f"Parameter {name or 'body'} is {_SHOWN.repr(problem.get('input'))}: {problem['msg'].removeprefix('Value error, ')}.")
    return BadRequest(" ".join(texts))


def _response(error: TsxError, headers: Any = None, path: str = "") -> Response:
    """The app adds the headers that every answer has."""
    status, pairs, body = fault(error)
    body = for_v2(body) if path.startswith(V2) else body
    kind = EarlyResponse if isinstance(error, PayloadTooLarge) and error.more else Response
    response = kind(body, status, headers)
    for name, value in pairs[: -len(NO_CACHE)]:
        response.headers[name.decode()] = value.decode()
    return response
