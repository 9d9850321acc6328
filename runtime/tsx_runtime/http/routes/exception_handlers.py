"""The exception handlers that turn errors of FastAPI's routes into the error JSON."""

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
    """A response that is sent before the request's body is complete; the rest is discarded."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:

        async def send_early(message: Message) -> None:
            if message["type"] == "http.response.body":
                await send_last(send, message["body"], receive)
            else:
                await send(message)

        await super().__call__(scope, receive, send_early)


def install(app: FastAPI, not_found: Callable[[str], TsxError]) -> None:
    """Let the app respond to all exceptions with the error JSON.

    `not_found` returns the error of a path without a route.
    """

    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, TsxError)
        return _response(error, path=request.url.path)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path: str = request.scope["path"]
        return _response(
            not_found(path) if error.status_code == 404 else from_http(error), error.headers, path
        )

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _response(from_validation(error.errors()))

    async def on_unexpected(request: Request, error: Exception) -> Response:
        # The framework raises the error again afterwards, and the app logs it.
        return _response(TsxError(UNEXPECTED))

    app.add_exception_handler(Exception, on_unexpected)
    app.add_exception_handler(TsxError, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)


def from_http(error: HTTPException) -> TsxError:
    """Convert an error that the framework raises by itself."""
    if error.status_code == 405:
        return MethodNotAllowed()
    return BadRequest(str(error.detail))


def _response(error: TsxError, headers: Any = None, path: str = "") -> Response:
    """Build the response of an error; the app adds the headers of all responses."""
    status, pairs, body = error_response(error, path)
    response_class = EarlyResponse if error.more else Response
    response = response_class(body, status, headers)
    for name, value in pairs[: -len(NO_CACHE)]:
        response.headers[name.decode()] = value.decode()
    return response
