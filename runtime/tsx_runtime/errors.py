"""The errors of serving, as one tree with one table of statuses.

    TsxError                     500  InternalServerException
    ├── BadRequest               400  BadRequestException
    ├── DownloadFailed           400  DownloadArchiveException
    ├── InvalidDag               400  InvalidDAGException
    ├── InvalidModel             400  ModelException
    ├── InvalidToken             400  InvalidKeyException (401 where token_failure_status = 401)
    ├── ForeignOrigin            403  ForeignOriginException
    ├── CannotRemoveDefault      403  InvalidModelVersionException
    ├── ResourceNotFound         404  ResourceNotFoundException
    ├── ModelNotFound            404  ModelNotFoundException
    ├── ModelVersionNotFound     404  ModelVersionNotFoundException
    ├── WorkflowNotFound         404  WorkflowNotFoundException
    ├── RolloutNotFound          404  RolloutNotFoundException
    ├── SampleNotFound           404  SampleNotFoundException
    ├── RequestNotFound          404  RequestNotFoundException
    ├── JobNotFound              404  JobNotFoundException
    ├── MethodNotAllowed         405  MethodNotAllowedException
    ├── CleanupTimeout           408  RequestTimeoutException
    ├── SlowRequest              408  RequestTimeoutException
    ├── Conflict                 409  ConflictStatusException
    ├── JobGone                  410  JobGoneException
    ├── PayloadTooLarge          413  PayloadTooLargeException
    ├── UnsupportedEncoding      415  UnsupportedMediaTypeException
    ├── KeyReused                422  IdempotencyKeyException
    ├── TooManyRequests          429  TooManyRequestsException
    ├── HeadTooLarge             431  BadRequestException
    ├── WorkerDied               500  InternalServerException
    ├── LoadFailed               500  InternalServerException
    │   ├── LoadOutOfMemory      507  InternalServerException
    │   └── WorkflowFailed       500  WorkflowException
    ├── InvalidWorkflow          500  InvalidWorkflowException
    ├── NodeFailed               500  InternalServerException (or the status that the node set)
    ├── ModelFileExists          500  InternalServerException
    ├── PredictionFailed         500  InternalServerException (or what `handler_error_status` says)
    ├── Unavailable              503  ServiceUnavailableException
    │   ├── NoWorker
    │   ├── QueueFull            (429 and TooManyRequestsException where overload_status = 429)
    │   ├── DeadlinePassed
    │   │   └── AnswerLate       504  GatewayTimeoutException
    │   ├── NoRoom
    │   ├── JobsFull
    │   ├── StoreUnavailable
    │   └── ClientLeft           (no client reads it)
    ├── OutOfResources           507  InternalServerException
    │   └── StoreFull
    └── SettingError             (never leaves the process: the command line prints it)

Names, statuses and the `type` column are what TorchServe's clients look for. An error's text says
what was wrong, with which value, and what to do next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

MAX_REFUSAL_CHARS = 1000  # length of a 4xx error, which may quote the client's request
MAX_FAILURE_CHARS = 64 << 10  # length of a 5xx error, which may quote a handler's exception


class TsxError(Exception):
    """The root of the tree, with the HTTP status and the `type` that TorchServe's clients know."""

    status = 500
    type = "InternalServerException"
    max_chars: int | None = None  # length of the text; None: the status decides

    def __init__(self, message: str, *, traceback: str | None = None, more: bool = False) -> None:
        message = shortened(
            message,
            self.max_chars or (MAX_REFUSAL_CHARS if self.status < 500 else MAX_FAILURE_CHARS),
        )
        super().__init__(message)
        self.message = message
        self.traceback = traceback
        self.more = more  # whether the sender of the request may still be sending


class BadRequest(TsxError):
    status = 400
    type = "BadRequestException"


class DownloadFailed(TsxError):
    """An archive could not be downloaded."""

    status = 400
    type = "DownloadArchiveException"


class InvalidModel(TsxError):
    """The model cannot be prepared for loading, for example to install its requirements."""

    status = 400
    type = "ModelException"
    max_chars = 16 << 10  # The text ends with pip's last lines.


class InvalidToken(TsxError):
    status = 400
    type = "InvalidKeyException"

    def __init__(self, message: str, *, status: int = 400, has_token: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.has_token = has_token  # whether the request had a token (a wrong one)


class ForeignOrigin(TsxError):
    status = 403
    type = "ForeignOriginException"


class CannotRemoveDefault(TsxError):
    status = 403
    type = "InvalidModelVersionException"


class ResourceNotFound(TsxError):
    status = 404
    type = "ResourceNotFoundException"


class ModelNotFound(TsxError):
    status = 404
    type = "ModelNotFoundException"


class ModelVersionNotFound(TsxError):
    status = 404
    type = "ModelVersionNotFoundException"


class WorkflowNotFound(TsxError):
    status = 404
    type = "WorkflowNotFoundException"


class RequestNotFound(TsxError):
    """The times of the request are not kept, or no longer."""

    status = 404
    type = "RequestNotFoundException"


class JobNotFound(TsxError):
    status = 404
    type = "JobNotFoundException"


class RolloutNotFound(TsxError):
    status = 404
    type = "RolloutNotFoundException"


class SampleNotFound(TsxError):
    status = 404
    type = "SampleNotFoundException"


class InvalidDag(TsxError):
    """The graph of a workflow has a cycle."""

    status = 400
    type = "InvalidDAGException"


class InvalidWorkflow(TsxError):
    """The archive or specification of a workflow cannot be used. The status is TorchServe's."""

    type = "InvalidWorkflowException"


class MethodNotAllowed(TsxError):
    status = 405
    type = "MethodNotAllowedException"

    def __init__(self, *, allowed: Sequence[str] = ()) -> None:
        super().__init__("Requested method is not allowed, please refer to API document.")
        self.allowed = allowed  # the methods that the path allows, if any


class CleanupTimeout(TsxError):
    status = 408
    type = "RequestTimeoutException"


class SlowRequest(TsxError):
    """The client took too long to send its request."""

    status = 408
    type = "RequestTimeoutException"


class Conflict(TsxError):
    status = 409
    type = "ConflictStatusException"


class JobGone(TsxError):
    """The job was cancelled, or its answer has expired."""

    status = 410
    type = "JobGoneException"


class PayloadTooLarge(TsxError):
    status = 413
    type = "PayloadTooLargeException"


class UnsupportedEncoding(TsxError):
    """The body has an unknown Content-Encoding."""

    status = 415
    type = "UnsupportedMediaTypeException"


class KeyReused(TsxError):
    """Another request was sent with this idempotency key."""

    status = 422
    type = "IdempotencyKeyException"


class TooManyRequests(TsxError):
    """A client has sent more requests than it may."""

    status = 429
    type = "TooManyRequestsException"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


class HeadTooLarge(TsxError):
    """The headers of a request are larger than the server accepts."""

    status = 431
    type = "BadRequestException"


class WorkerDied(TsxError):
    """The worker ended while it had the request."""


class LoadFailed(TsxError):
    """No worker could load the model; `traceback` is the worker's."""

    model = version = ""  # name and version of the model that was not registered
    outline = ""  # the traceback in short, for the log

    def named(self, source: str) -> LoadFailed:
        """Return the same failure with the model's file in its message."""
        failure = LoadFailed(f"{source} does not load: {self.message}", traceback=self.traceback)
        failure.outline = self.outline
        return failure


class LoadOutOfMemory(LoadFailed):
    """The machine or its GPU has too little memory for the model."""

    status = 507


class ModelFileExists(TsxError):
    """The model store already has a file with the name of a download."""


class WorkflowFailed(LoadFailed):
    """A workflow is not registered, because one of its nodes could not be registered."""

    type = "WorkflowException"


class NodeFailed(TsxError):
    """A node of a workflow has returned nothing that the next node could use."""

    def __init__(self, message: str, *, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class PredictionFailed(TsxError):
    """The handler has raised, or returned something that cannot be sent."""

    def __init__(self, message: str, *, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(TsxError):
    status = 503
    type = "ServiceUnavailableException"

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds after which a new try is likely to succeed


class NoWorker(Unavailable):
    """No worker serves this model, and none is starting."""


class QueueFull(Unavailable):
    """The model's queue has reached its limit."""

    def __init__(self, message: str, *, retry_after: int = 1, status: int = 503) -> None:
        super().__init__(message, retry_after=retry_after)
        if status != 503:
            self.status = status
            self.type = "TooManyRequestsException"


class DeadlinePassed(Unavailable):
    """The deadline of the client or the model passed before a worker started the request."""


class AnswerLate(DeadlinePassed):
    """A worker started the request but missed the deadline: the request may have had effects."""

    status = 504
    type = "GatewayTimeoutException"


class NoRoom(Unavailable):
    """All bodies and answers in flight leave no room for another one (`max_inflight_bytes`)."""


class JobsFull(Unavailable):
    """No more asynchronous requests are stored before others are answered."""


class StoreUnavailable(Unavailable):
    """The store of asynchronous requests cannot be read or written."""


class ClientLeft(Unavailable):
    """The client closed its connection while the request waited."""


class OutOfResources(TsxError):
    status = 507


class StoreFull(OutOfResources):
    """The disk with the store of asynchronous requests is full."""


class SettingError(TsxError):
    """A setting is unknown, or its value cannot be used."""


def shortened(text: str, max_chars: int, tail: int = 0) -> str:
    """Cut a text to `max_chars` characters, and tell how many are left out.

    The last `tail` of these characters are taken from the end of the text.
    """
    if len(text) <= max_chars:
        return text
    beginning = f"{text[: max_chars - tail]}... [{len(text) - max_chars} characters left out]"
    return f"{beginning} ...{text[-tail:]}" if tail else beginning


def is_failure(outcome: int | TsxError) -> bool:
    """Tell whether a status or a refusal counts as a failure of the model, not of its client.

    A refusal counts by its class, whatever its status: a full queue may be answered with 429.
    """
    if isinstance(outcome, TsxError):
        return type(outcome).status >= 500 and not isinstance(outcome, ClientLeft)
    return outcome >= 500


MAX_CACHED_CHARS = 2000  # Longer messages are not cached: one that quotes a request may be huge.


def error_body(status: int, type: str, message: str) -> bytes:
    """Return TorchServe's error JSON: indented by two spaces, with a newline at the end.

    JSON can bring half a surrogate pair to the server, but UTF-8 cannot encode it in an answer.
    """
    return (
        _cached_error_body(status, type, message)
        if len(message) <= MAX_CACHED_CHARS
        else _error_body(status, type, message)
    )


def _error_body(status: int, type: str, message: str) -> bytes:
    # Only the message is encoded by json, since `indent` would take five times as long.
    text = json.dumps(message, ensure_ascii=False)
    return f'{{\n  "code": {status},\n  "type": "{type}",\n  "message": {text}\n}}\n'.encode(
        errors="replace"
    )


# An overloaded server sends few different messages, but sends them often.
_cached_error_body = lru_cache(maxsize=64)(_error_body)


# The server's own errors are shorter, but a handler may send anything.
MAX_PARSED_BYTES = 256 << 10


def read_error(body: bytes) -> dict[str, Any]:
    """Return the error JSON in a response body, or {} if it is no error with a text message.

    A large body is not parsed, because that would block the event loop.
    """
    if len(body) > MAX_PARSED_BYTES or not body.startswith(b"{"):
        return {}
    try:
        error: dict[str, Any] = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return error if isinstance(error.get("message"), str) else {}
