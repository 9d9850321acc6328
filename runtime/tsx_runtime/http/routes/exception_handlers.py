"""The exception handlers that respond to errors of FastAPI's routes with the error JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tsx_runtime.api.errors import UNEXPECTED, error_response
from tsx_runtime.api.headers import NO_CACHE
from tsx_runtime.api.management.schemas import from_validation
from tsx_runtime.api.messages import Message, Receive, Scope, Send, send_last
from tsx_runtime.errors import BadRequest, MethodNotAllowed, TsxError


class EarlyResponse(Response):
    """A response that is sent before the request's body is complete, which is then discarded."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:

        async def send_early(message: Message) -> None:
            if message["type"] == "http.response.body":
                await send_last(send, message["body"], receive)
            else:
                await send(message)

        await super().__call__(scope, receive, send_early)


def add_exception_handlers(app: FastAPI, not_found: Callable[[str], TsxError]) -> None:
    """Add exception handlers to an app, so that every error response has the error JSON.

    `not_found` returns the error for a path without a route.
    """

    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, TsxError)
        return _response(error, path=request.url.path)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path: str = request.scope["path"]
        return _response(
            not_found(path) if error.status_code == 404 else convert_http_error(error),
            error.headers,
            path,
        )

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _response(from_validation(error.errors()))

    async def on_unexpected(request: Request, error: Exception) -> Response:
        # FastAPI raises the error again after this response, and then the app logs it.
        return _response(TsxError(UNEXPECTED))

    app.add_exception_handler(Exception, on_unexpected)
    app.add_exception_handler(TsxError, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)


def convert_http_error(error: HTTPException) -> TsxError:
    """Convert an error that FastAPI itself has raised."""
    if error.status_code == 405:
        return MethodNotAllowed()
    return BadRequest(str(error.detail))


def _response(error: TsxError, headers: Any = None, path: str = "") -> Response:
    """Build the response for an error, without the headers that the app adds to all responses."""
    status, pairs, body = error_response(error, path)
    response_class = EarlyResponse if error.more else Response
    response = response_class(body, status, headers)
    for name, value in pairs[: -len(NO_CACHE)]:
        response.headers[name.decode()] = value.decode()
    return response
