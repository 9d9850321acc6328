"""The conversion of a handler's result or error into responses.

A response is a status, a header block and a body. See docs/reference/torchserve.md.
"""

from __future__ import annotations

import io
import logging
import sys
from typing import Any, TypeAlias

from tsx_runtime.errors import (
    BadRequest,
    OutOfResources,
    PredictionFailed,
    TsxError,
    Unavailable,
    error_body,
)
from tsx_runtime.wire import JSON_HEADER, Buffer
from tsx_runtime.worker.codecs.json_text import NULL, EncodedBody, JsonText, to_json
from tsx_runtime.worker.codecs.requests import json_fault
from tsx_runtime.worker.codecs.v2_binary import TensorResponse
from tsx_runtime.worker.exceptions import (
    BadRows,
    EngineDied,
    InvalidInput,
    PredictionException,
    describe_error,
    error_text,
)
from tsx_runtime.worker.handler_api.context import Context, RequestProcessor

Answer: TypeAlias = tuple[int, Buffer, Buffer]

# These two messages begin as in TorchServe.
COUNT_MISMATCH_MESSAGE = "number of batch response mismatched"
NOT_A_LIST_MESSAGE = "Invalid model predict output"

MAX_CAUSES = 10  # A limit, since the causes of an error may form a cycle.

# The header that tells whether another part of a response follows.
NEXT_PART_HEADER = "ts_stream_next"

logger = logging.getLogger("tsx.worker")


def encode_body(value: Any, nan: str = NULL) -> Buffer:
    """Encode a value: bytes as they are, text as UTF-8, a tensor by `torch.save`, others as JSON.

    Raises:
        PredictionFailed: The value has none of these types.
    """
    return encode(value, nan)[1]


def encode(value: Any, nan: str = NULL) -> tuple[Buffer, Buffer]:
    """Return the header block for the value's type, and the body as in `encode_body`.

    A `PredictionFailed` is raised, so that only its request fails.
    """
    kind = type(value)
    if kind is str:
        return b"", value.encode()
    # Most results are a dict or a list.
    if kind is not dict and kind is not list:
        # A check against a tuple takes half the time of one against a union.
        if isinstance(value, (bytes, bytearray)):
            return value.headers if isinstance(value, EncodedBody) else b"", value
        if isinstance(value, str):
            return JSON_HEADER if isinstance(value, JsonText) else b"", value.encode()
        # If the value is a tensor, the handler has imported torch.
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            file = io.BytesIO()
            torch.save(value, file)
            return b"", file.getvalue()
        if isinstance(value, TensorResponse):
            return b"", value.encode(nan)
        if isinstance(value, PredictionFailed):
            raise value
    try:
        return JSON_HEADER, to_json(value, nan).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PredictionFailed(
            f"Unsupported model output data type. The handler returned {_type_name(value)}, "
            f"which is neither bytes, str, a tensor nor JSON: {error}"
        ) from error


def encode_answers(
    results: list[Any], context: Context, limit: int, error_status: int = 500
) -> list[Answer]:
    """Encode the results of a batch.

    If a result cannot be encoded, only its request fails, with `error_status`.
    """
    processors, nan = context.processors, context.json_nan
    guess_content_type = context.guess_content_type
    answers: list[Answer] = []
    for idx, value in enumerate(results):
        try:
            headers, body = encode(value, nan)
            if len(body) > limit:
                raise PredictionFailed(
                    f"The answer has {len(body)} bytes, but max_response_size is {limit}. Raise it,"
                    " or return a smaller answer."
                )
            processor = processors.get(idx)
            if processor is None:
                answers.append(
                    (
                        200,
                        context.add_content_type(headers, body) if guess_content_type else headers,
                        body,
                    )
                )
            else:
                block = processor.header_block()
                if headers and processor.get_response_header("content-type") is None:
                    block += headers
                answers.append(
                    (
                        _status_of(processor),
                        context.add_content_type(block, body) if guess_content_type else block,
                        body,
                    )
                )
        except PredictionFailed as error:
            logger.error(
                "the answer of request %s cannot be sent: %s", context.get_request_id(idx), error
            )
            answers.append(failure(error, error_status))
        # JSON or pickle may call methods of the user's value, which may raise anything.
        except Exception as error:
            logger.error(
                "the answer of request %s cannot be sent",
                context.get_request_id(idx),
                exc_info=error,
            )
            answers.append(failure(error, error_status))
    return answers


def _status_of(processor: RequestProcessor) -> int:
    """Return the status, and check it, since the handler may have replaced the processor."""
    status = processor.get_response_status_code()
    if not isinstance(status, int) or not 200 <= status <= 599:
        raise PredictionFailed(
            f"The handler set the HTTP status {status!r}; it must lie between 200 and 599."
        )
    return status


def check_results(results: Any, expected: int, handler: str) -> PredictionFailed | None:
    """Return the error if a handler's result is not a list with one entry per request."""
    if not isinstance(results, list):
        return PredictionFailed(
            f"{NOT_A_LIST_MESSAGE}. Handler {handler} returned {type(results).__name__}; it must"
            " return a list"
            " with one entry per request."
        )
    if len(results) != expected:
        return PredictionFailed(
            f"{COUNT_MISMATCH_MESSAGE}, expect: {expected}, got: {len(results)}. "
            f"Handler {handler} must return a list with one entry a request, in their order."
        )
    return None


def failure(error: BaseException, error_status: int = 500) -> Answer:
    """Return the response for an exception.

    Args:
        error: The exception.
        error_status: The status of an error of the handler.
    """
    if isinstance(error, PredictionException):
        code = (
            error.error_code
            if isinstance(error.error_code, int) and 400 <= error.error_code <= 599
            else 500
        )
        kind = (
            BadRequest.type
            if code == 400 and isinstance(error, BadRows | InvalidInput)
            else TsxError.type
        )
        return (code, JSON_HEADER, error_body(code, kind, str(error.message)))
    if isinstance(error, TsxError):
        reported_error = error
    elif is_out_of_resources(error):
        reported_error = OutOfResources(f"Out of resources: {describe_error(error)}")
    else:
        reported_error = PredictionFailed(f"Prediction failed: {describe_error(error)}")
    code = error_status if isinstance(reported_error, PredictionFailed) else reported_error.status
    retry_after_s = getattr(reported_error, "retry_after", None)
    headers = (
        JSON_HEADER
        if retry_after_s is None
        else JSON_HEADER + b"retry-after: %d\r\n" % retry_after_s
    )
    return (code, headers, error_body(code, reported_error.type, reported_error.message))


def failure_of(
    error: BaseException, meta: str, body: Buffer, error_status: int
) -> tuple[BaseException, Answer]:
    """Return the error to log, and the response to a request for which a handler has failed.

    If the body is invalid JSON, the client is at fault, and gets a 400.
    """
    if isinstance(error, PredictionException | TsxError) or is_out_of_resources(error):
        return error, failure(error, error_status)
    reported_error = json_fault(meta, body, f"Prediction failed: {describe_error(error)}") or error
    logged_error = reported_error if isinstance(reported_error, InvalidInput) else error
    return logged_error, failure(reported_error, error_status)


def is_out_of_resources(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError)
        or is_out_of_device_memory(error)
        or (isinstance(error, RuntimeError) and "CUDA" in error_text(error))
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether the machine or a device is out of memory, even if another error followed."""
    for _ in range(MAX_CAUSES):
        if error is None:
            return False
        if (
            isinstance(error, MemoryError)
            or is_out_of_device_memory(error)
            or "allocate memory" in error_text(error)  # the text of Linux and torch
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_out_of_device_memory(error: BaseException) -> bool:
    """Tell whether a device is out of memory, so that a smaller batch may fit.

    torch's allocator has its own class of error. Errors of CUDA's libraries are recognized by
    their text.
    """
    if not isinstance(error, RuntimeError):
        return False
    text = error_text(error)
    return (
        type(error).__name__ == "OutOfMemoryError"
        or ("CUDA" in text and "out of memory" in text)
        or "_STATUS_ALLOC_FAILED" in text
    )


def is_device_lost(error: BaseException) -> bool:
    """Tell whether the worker must be replaced.

    After such an error, every later call of CUDA or of the engine fails in this process.
    """
    if isinstance(error, EngineDied):
        return True
    return (
        isinstance(error, RuntimeError)
        and "CUDA error" in error_text(error)
        and not is_out_of_device_memory(error)
    )


def streamed_headers(header_block: Buffer) -> Buffer:
    """Add the header that announces further parts to the headers of a response's first part."""
    return (
        header_block
        if NEXT_PART_HEADER.encode() in bytes(header_block).lower()
        else bytes(header_block) + f"{NEXT_PART_HEADER}: true\r\n".encode()
    )


def _type_name(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


CANCELLED = failure(Unavailable("The request was cancelled before it was answered; send it again."))
# The response to a client that has disconnected: nobody gets it, and it is not counted as a
# failure.
GONE: Answer = (499, JSON_HEADER, error_body(499, Unavailable.type, "The client has left."))
