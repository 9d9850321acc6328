"""The errors of a client.

ClientError
├── ConnectionFailed      no server answered, or the connection was lost
├── DeadlineExceeded      `timeout` has passed
├── StreamInterrupted     an answer that had begun did not end
├── InvalidAnswer         an answer is not what its headers or the protocol say
└── RequestFailed         the server's answer is an error: `status`, `type`, `message`, `request_id`
    ├── InvalidRequest    another 3xx or 4xx
    ├── AccessDenied      401, 403, or a wrong token
    ├── NotFound          404: no such model, version or path
    ├── Overloaded        429 or 503: `retry_after` says when to come again
    └── ServerError       another 5xx: the handler failed, or the server
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


class ClientError(Exception): ...


class ConnectionFailed(ClientError):
    """`before_request`: the server has seen nothing of the request."""

    def __init__(self, message: str, *, before_request: bool = False) -> None:
        super().__init__(message)
        self.before_request = before_request


class DeadlineExceeded(ClientError):
    """Whether the model ran is not known."""


class StreamInterrupted(ClientError):
    """The pieces so far are valid."""


class InvalidAnswer(ClientError): ...


class RequestFailed(ClientError):
    """`type` is TorchServe's name of the error, or empty; `body` the answer as it came."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body
        self.request_id = headers.get("x-request-id")
        self.retry_after = _seconds(headers.get("retry-after"))
        self.type, self.message = words_of(body)
        super().__init__(
            f"{self.message} (status {status}, request {self.request_id or 'without an id'})"
        )


class InvalidRequest(RequestFailed): ...


class AccessDenied(RequestFailed): ...


class NotFound(RequestFailed): ...


class Overloaded(RequestFailed): ...


class ServerError(RequestFailed): ...


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what a broken answer raises into InvalidAnswer."""
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
        raise InvalidAnswer(f"{what} cannot be read ({type(error).__name__}: {error})") from error


def extra(module: str, install: str) -> Any:
    """A module that few programs need."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}. Install it: pip install '{install}'") from error


def failure(status: int, headers: Mapping[str, str], body: bytes) -> RequestFailed:
    if b"InvalidKeyException" in body[:200]:
        return AccessDenied(status, headers, body)
    if (
        b"InternalServerException" in body[:200]
    ):  # also with 503, for a handler that failed (`handler_error_status`), and that has run
        return ServerError(status, headers, body)
    kinds = {401: AccessDenied, 403: AccessDenied, 404: NotFound, 429: Overloaded, 503: Overloaded}
    kind: type[RequestFailed] = kinds.get(status) or (
        InvalidRequest if status < 500 else ServerError
    )
    return kind(status, headers, body)


def words_of(body: bytes) -> tuple[str, str]:
    """Type and message of TorchServe's form, or of OpenAI's."""
    try:
        given = json.loads(body)
        own = given if "message" in given else given["error"]
        return str(own.get("type") or ""), str(own["message"]).strip()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "", body[:500].decode(errors="replace").strip() or "The answer has no text."


def _seconds(value: str | None) -> float | None:
    """Of a Retry-After."""
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
