"""One node of a running workflow: its request, its retries, and its timeout."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass

from tsx_runtime import wire
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Answer, WaitingJob
from tsx_runtime.core.telemetry.tracing import current
from tsx_runtime.errors import (
    AnswerLate,
    DeadlinePassed,
    NodeFailed,
    OutOfResources,
    TsxError,
    Unavailable,
    read_error,
)
from tsx_runtime.workflows.schedule import Output

MAX_EXCERPT_CHARS = 1000  # length of a node's own text in an error


@dataclass(frozen=True)
class WorkflowRequest:
    """A client's request as every node gets it; `deadline` is of time.monotonic()."""

    id: str
    headers: list[tuple[bytes, bytes]]
    body: wire.Body
    deadline: float | None = None
    priority: int = 0


@dataclass(frozen=True)
class RunningNode:
    name: str
    version: ModelVersion
    retries: int
    timeout: float  # seconds of one attempt
    position: bytes = b""  # the value of NODE_HEADER


class _AttemptTimeout(TsxError):
    """One attempt took longer than the node's timeout."""


class _NodeRefusal(TsxError):
    """The node's own handler answered with an error below 500: a retry would not help."""


async def ask(
    node: RunningNode, headers: list[tuple[bytes, bytes]], body: wire.Body, request: WorkflowRequest
) -> Output:
    """Send a request to a node, with retries, and return its output.

    Raises:
        NodeFailed: The node failed or gave no usable answer.
        Unavailable: The node is overloaded; it may say when to try again.
        OutOfResources: The node ran out of memory.
    """
    parent_span = current.get()
    if parent_span is None:
        return await _ask(node, headers, body, request)
    span = parent_span.child(f"node {node.name}", time.monotonic())
    current.set(span)  # only for the task of this node
    error = "cancelled"
    try:
        output = await _ask(node, headers, body, request)
        error = ""
        return output
    except TsxError as failure:
        error = type(failure.__cause__ or failure).__name__
        raise
    finally:
        span.finish(time.monotonic(), error)


async def _ask(
    node: RunningNode, headers: list[tuple[bytes, bytes]], body: wire.Body, request: WorkflowRequest
) -> Output:
    meta = wire.request_meta(
        request.id, b"", [(wire.NODE_HEADER, node.position), *headers] if node.position else headers
    )
    for attempt in range(1, node.retries + 2):
        try:
            return await _attempt(node, meta, body, request)
        except (Unavailable, _NodeRefusal) as error:
            # A retry would only add to the load, or to the log.
            raise _named(node, error, attempt) from error
        except TsxError as error:
            if attempt > node.retries:
                raise _named(node, error, attempt) from error
    raise AssertionError("the last attempt returns or raises")


async def _attempt(
    node: RunningNode, meta: bytes, body: wire.Body, request: WorkflowRequest
) -> Output:
    now = time.monotonic()
    end = (
        now + node.timeout
        if request.deadline is None
        else min(now + node.timeout, request.deadline)
    )
    if end <= now:
        raise DeadlinePassed("the deadline of the request has passed")
    # An attempt that ends leaves its queue, so the job needs only the deadline of the request.
    job = WaitingJob(meta, body, now, request.deadline, request.priority)
    if (parent_span := current.get()) is not None:
        job.trace(parent_span, node.version)
    node.version.submit(job)
    is_over = False
    try:
        answer, content = await asyncio.wait_for(
            _take(job, node.version.max_response_size), end - now
        )
        is_over = True
    except TsxError:
        is_over = job.done.exception() is not None
        raise
    except (TimeoutError, asyncio.TimeoutError):
        if end == request.deadline:
            raise AnswerLate("the deadline of the request has passed") from None
        raise _AttemptTimeout(
            f"it did not answer within {node.timeout * 1000:.0f} ms (timeout-ms)"
        ) from None
    finally:
        # A worker whose answer streams gets a message and can stop.
        if not is_over:
            node.version.leave(job)
    if answer.status >= 400:
        raise _failure(answer.status, content)
    return Output(answer.status, answer.headers, content)


async def _take(job: WaitingJob, max_bytes: int) -> tuple[Answer, bytes]:
    answer = await job.done
    try:
        return answer, await answer.read_all(max_bytes)
    except BaseException:
        job.gone = True  # The rest of a stream is not read.
        answer.leave()
        raise


def _failure(status: int, body: bytes) -> TsxError:
    """Return the error of a handler that failed, or that set an error status itself."""
    text = body[:MAX_EXCERPT_CHARS].decode("utf-8", "replace")
    error = read_error(body)
    if error.get("code") == status and error.get("type"):
        text = error["message"]
    if status == OutOfResources.status:
        return OutOfResources(text)
    if status < 500:
        refused = _NodeRefusal(f"it answered with status {status}: {text}")
        refused.status = status
        return refused
    # TorchServe answers 500 when a node of a workflow fails.
    return NodeFailed(text, status=500 if status == 503 else status)


def _named(node: RunningNode, error: TsxError, attempts: int) -> TsxError:
    """Put TorchServe's text, which its clients look for, before the message of an error."""
    attempts_text = f" (attempts: {attempts})" if attempts > 1 else ""
    message = f"Error executing {node.name}: {error.message}{attempts_text}"
    if isinstance(error, Unavailable | OutOfResources):
        named = copy.copy(error)
        named.message = message
        return named
    return NodeFailed(
        message, status=error.status if isinstance(error, NodeFailed | _NodeRefusal) else 500
    )
