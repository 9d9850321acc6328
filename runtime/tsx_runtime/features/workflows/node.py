"""One node of a running workflow, with its requests, retries and timeout."""

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
from tsx_runtime.features.workflows.schedule import Output

MAX_EXCERPT_CHARS = 1000  # the length of a node's text in an error


@dataclass(frozen=True)
class WorkflowRequest:
    """A client's request, which every node gets; `deadline` is a value of time.monotonic()."""

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
    timeout: float  # seconds for one attempt
    position: bytes = b""  # the value of NODE_HEADER


class _AttemptTimeout(TsxError):
    """An attempt took longer than the node's timeout."""


class _NodeRefusal(TsxError):
    """The node's handler answered with a status below 500, so a retry would not help."""


async def ask_node(
    node: RunningNode, headers: list[tuple[bytes, bytes]], body: wire.Body, request: WorkflowRequest
) -> Output:
    """Send a request to a node, with retries, and return its output.

    Raises:
        NodeFailed: The node failed or did not answer in time.
        Unavailable: The node is overloaded; it may say when to try again.
        OutOfResources: The node ran out of memory.
    """
    parent_span = current.get()
    if parent_span is None:
        return await _ask_with_retries(node, headers, body, request)
    span = parent_span.child(f"node {node.name}", time.monotonic())
    current.set(span)  # The context variable belongs to this node's task.
    error = "cancelled"
    try:
        output = await _ask_with_retries(node, headers, body, request)
        error = ""
        return output
    except TsxError as failure:
        error = type(failure.__cause__ or failure).__name__
        raise
    finally:
        span.finish(time.monotonic(), error)


async def _ask_with_retries(
    node: RunningNode, headers: list[tuple[bytes, bytes]], body: wire.Body, request: WorkflowRequest
) -> Output:
    meta = wire.request_meta(
        request.id, b"", [(wire.NODE_HEADER, node.position), *headers] if node.position else headers
    )
    for attempt in range(1, node.retries + 2):
        try:
            return await _attempt(node, meta, body, request)
        except (Unavailable, _NodeRefusal) as error:
            # A retry would only add to the load or to the log.
            raise _with_node_name(node, error, attempt) from error
        except TsxError as error:
            if attempt > node.retries:
                raise _with_node_name(node, error, attempt) from error
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
    # The job gets only the request's deadline: an attempt that times out leaves the queue anyway.
    job = WaitingJob(meta, body, now, request.deadline, request.priority)
    if (parent_span := current.get()) is not None:
        job.trace(parent_span, node.version)
    node.version.submit(job)
    has_ended = False
    try:
        answer, content = await asyncio.wait_for(
            _read_answer(job, node.version.max_response_size), end - now
        )
        has_ended = True
    except TsxError:
        has_ended = job.done.exception() is not None
        raise
    except (TimeoutError, asyncio.TimeoutError):
        if end == request.deadline:
            raise AnswerLate("the deadline of the request has passed") from None
        raise _AttemptTimeout(
            f"it did not answer within {node.timeout * 1000:.0f} ms (timeout-ms)"
        ) from None
    finally:
        # This tells a worker that is streaming an answer to stop.
        if not has_ended:
            node.version.leave(job)
    if answer.status >= 400:
        raise _failure(answer.status, content)
    return Output(answer.status, answer.headers, content)


async def _read_answer(job: WaitingJob, max_bytes: int) -> tuple[Answer, bytes]:
    answer = await job.done
    try:
        return answer, await answer.read_all(max_bytes)
    except BaseException:
        job.gone = True  # Nobody reads the rest of the stream.
        answer.leave()
        raise


def _failure(status: int, body: bytes) -> TsxError:
    """Return the error for the answer of a handler that failed or set an error status."""
    text = body[:MAX_EXCERPT_CHARS].decode("utf-8", "replace")
    error = read_error(body)
    if error.get("code") == status and error.get("type"):
        text = error["message"]
    if status == OutOfResources.status:
        return OutOfResources(text)
    if status < 500:
        refusal = _NodeRefusal(f"it answered with status {status}: {text}")
        refusal.status = status
        return refusal
    # TorchServe answers with 500, not 503, when a node of a workflow fails.
    return NodeFailed(text, status=500 if status == 503 else status)


def _with_node_name(node: RunningNode, error: TsxError, attempts: int) -> TsxError:
    """Put TorchServe's text before an error's message, since clients search for this text."""
    attempts_text = f" (attempts: {attempts})" if attempts > 1 else ""
    message = f"Error executing {node.name}: {error.message}{attempts_text}"
    if isinstance(error, Unavailable | OutOfResources):
        named_error = copy.copy(error)
        named_error.message = message
        return named_error
    return NodeFailed(
        message, status=error.status if isinstance(error, NodeFailed | _NodeRefusal) else 500
    )
