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

EXCERPT = 1000  # characters of a node's own words in an error


@dataclass(frozen=True)
class WorkflowRequest:
    """What came from the client, for every node; `deadline` is of time.monotonic()."""

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
    timeout: float  # s, of one attempt
    place: bytes = b""  # the value of NODE_HEADER


class _AttemptTimeout(TsxError):
    """One attempt took longer than the node's timeout."""


class _NodeRefusal(TsxError):
    """The node's own handler answered with an error status below 500: it would do so again."""


async def ask(
    node: RunningNode, headers: list[tuple[bytes, bytes]], body: wire.Body, request: WorkflowRequest
) -> Output:
    """Raises a `TsxError` that names the node: NodeFailed, Unavailable (with when to try again),
    OutOfResources.
    """
    above = current.get()
    if above is None:
        return await _ask(node, headers, body, request)
    span = above.child(f"node {node.name}", time.monotonic())
    current.set(span)  # of this node's task alone
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
        request.id, b"", [(wire.NODE_HEADER, node.place), *headers] if node.place else headers
    )
    for attempt in range(1, node.retries + 2):
        try:
            return await _attempt(node, meta, body, request)
        except (
            Unavailable,
            _NodeRefusal,
        ) as error:  # the same again would only add to the load, or to the log
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
    job = WaitingJob(
        meta, body, now, request.deadline, request.priority
    )  # its queue need not know of this attempt's end: it is left then
    if (above := current.get()) is not None:
        job.trace(above, node.version)
    node.version.submit(job)
    over = False
    try:
        answer, whole = await asyncio.wait_for(
            _take(job, node.version.max_response_size), end - now
        )
        over = True
    except TsxError:
        over = job.done.exception() is not None
        raise
    except (TimeoutError, asyncio.TimeoutError):
        if end == request.deadline:
            raise AnswerLate("the deadline of the request has passed") from None
        raise _AttemptTimeout(
            f"it did not answer within {node.timeout * 1000:.0f} ms (timeout-ms)"
        ) from None
    finally:
        if not over:  # also where its answer streams: a worker that can stop gets a message
            node.version.leave(job)
    if answer.status >= 400:
        raise _failure(answer.status, whole)
    return Output(answer.status, answer.headers, whole)


async def _take(job: WaitingJob, most: int) -> tuple[Answer, bytes]:
    answer = await job.done
    try:
        return answer, await answer.read_all(most)
    except BaseException:
        job.gone = True  # the rest of a stream is not read
        answer.leave()
        raise


def _failure(status: int, body: bytes) -> TsxError:
    """What a worker says of a handler that failed, or a handler says itself by its status."""
    text = body[:EXCERPT].decode("utf-8", "replace")
    error = read_error(body)
    if error.get("code") == status and error.get("type"):
        text = error["message"]
    if status == OutOfResources.status:
        return OutOfResources(text)
    if status < 500:
        refused = _NodeRefusal(f"it answered with status {status}: {text}")
        refused.status = status
        return refused
    return NodeFailed(
        text, status=500 if status == 503 else status
    )  # TorchServe's status of a workflow whose node failed


def _named(node: RunningNode, error: TsxError, attempts: int) -> TsxError:
    """TorchServe's words, which its clients look for, then why."""
    tried = f" (attempts: {attempts})" if attempts > 1 else ""
    message = f"Error executing {node.name}: {error.message}{tried}"
    if isinstance(error, Unavailable | OutOfResources):
        named = copy.copy(error)
        named.message = message
        return named
    return NodeFailed(
        message, status=error.status if isinstance(error, NodeFailed | _NodeRefusal) else 500
    )
