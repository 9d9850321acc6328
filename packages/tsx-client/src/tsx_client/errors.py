"""The errors of a client.

ClientError
├── ConnectionFailed      no server answered, or the connection was lost
├── DeadlineExceeded      `timeout` has passed
├── StreamInterrupted     a response ended early
├── InvalidAnswer         a response contradicts its headers or the protocol
└── RequestFailed         the server answers with an error: `status`, `type`, `message`
    ├── InvalidRequest    another 3xx or 4xx
    ├── AccessDenied      401, 403, or a wrong token
    ├── NotFound          404: no such model, version or path
    ├── Overloaded        429 or 503; `retry_after` is the seconds to wait
    └── ServerError       another 5xx: the handler or the server failed
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from importlib import import_module
from time import time
from typing import Any


class ClientError(Exception):
    """The base of all errors of a client."""


class ConnectionFailed(ClientError):
    """No server answers, or it ended the connection.

    Attributes:
        before_request: Whether the server cannot have seen the request.
    """

    def __init__(self, message: str, *, before_request: bool = False) -> None:
        super().__init__(message)
        self.before_request = before_request


class DeadlineExceeded(ClientError):
    """The timeout has passed; the model may have run."""


class StreamInterrupted(ClientError):
    """A response ended early; the pieces before its end are valid."""


class InvalidAnswer(ClientError):
    """A response contradicts its headers or the protocol."""


class RequestFailed(ClientError):
    """The server answers with an error.

    Attributes:
        status: The HTTP status.
        headers: The headers of the response.
        body: The bytes of the response.
        type: TorchServe's name of the error, or an empty string.
        message: The text of the error.
        request_id: The id of the request in the server's log, or None.
        retry_after: Seconds after which to try again, or None.
    """

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body
        self.request_id = headers.get("x-request-id")
        self.retry_after = _seconds(headers.get("retry-after"))
        self.type, self.message = error_of(body)
        super().__init__(
            f"{self.message} (status {status}, request {self.request_id or 'without an id'})"
        )


class InvalidRequest(RequestFailed):
    """The server refuses the request: a 3xx or 4xx without a class of its own."""


class AccessDenied(RequestFailed):
    """The token is missing, wrong, or not allowed to do this."""


class NotFound(RequestFailed):
    """The server has no such model, version or path."""


class Overloaded(RequestFailed):
    """The server refuses the request for now; `retry_after` is the time to wait."""


class ServerError(RequestFailed):
    """The handler or the server failed."""


@contextmanager
def reading(label: str) -> Iterator[None]:
    """Raise InvalidAnswer for every error that a malformed response causes."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise InvalidAnswer(f"{label} cannot be read ({type(error).__name__}: {error})") from error


def extra(module: str, install: str) -> Any:
    """Import an optional package.

    Raises:
        ImportError: The package is missing; the message shows how to install it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}. Install it: pip install '{install}'") from error


def failure(status: int, headers: Mapping[str, str], body: bytes) -> RequestFailed:
    """Return the error for a response."""
    if b"InvalidKeyException" in body[:200]:
        return AccessDenied(status, headers, body)
    # A failed handler may have status 503 (setting handler_error_status). The handler has run, so
    # this error must not be Overloaded, which would be repeated.
    if b"InternalServerException" in body[:200]:
        return ServerError(status, headers, body)
    kinds = {401: AccessDenied, 403: AccessDenied, 404: NotFound, 429: Overloaded, 503: Overloaded}
    kind: type[RequestFailed] = kinds.get(status) or (
        InvalidRequest if status < 500 else ServerError
    )
    return kind(status, headers, body)


def error_of(body: bytes) -> tuple[str, str]:
    """Return the type and the message of an error in the form of TorchServe, OpenAI or FastAPI."""
    try:
        value = json.loads(body)
        if "detail" in value:
            return "", "; ".join(map(_problem, value["detail"]))
        error = value if "message" in value else value["error"]
        return str(error.get("type") or ""), str(error["message"]).strip()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "", body[:500].decode(errors="replace").strip() or "The answer has no text."


def _problem(problem: Mapping[str, Any]) -> str:
    """Return an error of FastAPI as `field: message`."""
    field = f"{'.'.join(map(str, problem['loc']))}.".removeprefix("body.").rstrip(".")
    return f"{field}: {problem['msg']}" if field else str(problem["msg"])


def _seconds(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header."""
    if value is None:
        return None
    try:
        return max(
            0.0,
            (
                float(value)
                if value.strip().isdigit()
                else parsedate_to_datetime(value).timestamp() - time()
            ),
        )
    except (ValueError, TypeError):
        return None
