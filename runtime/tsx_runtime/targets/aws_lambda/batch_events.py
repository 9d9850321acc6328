"""Requests in other events than HTTP: those of one event are submitted to the model together, and
so run as batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tsx_runtime import wire
from tsx_runtime.api.headers import (
    check_distinct,
    handler_headers,
    is_header,
    new_request_id,
    shown_headers,
)
from tsx_runtime.api.urls import Target, resolve
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Route, WaitingJob
from tsx_runtime.errors import BadRequest, TsxError
from tsx_runtime.shared.content_types import looks_like
from tsx_runtime.targets.aws_lambda import events as events
from tsx_runtime.targets.aws_lambda.environment import is_place
from tsx_runtime.targets.aws_lambda.events import ModelRequest
from tsx_runtime.targets.aws_lambda.http_events import TooLate, too_late
from tsx_runtime.targets.aws_lambda.results import Result, ResultSender

# share of an invocation's time for sending answers elsewhere: messages whose answer is not sent are
# delivered again
SENDING = 0.1
MESSAGE = "message"  # of TSX_LAMBDA_RESULTS: each says where its answer goes

logger = logging.getLogger("tsx.lambda")


class ModelAnswer(NamedTuple):
    status: int
    content_type: str
    body: bytes


async def answer_all(
    registry: Registry, requests: Sequence[ModelRequest | TsxError], seconds: float
) -> list[ModelAnswer | TsxError]:
    """The answers, in the order of the requests.

    Requests that take longer than `seconds` are abandoned; errors are passed through.
    """
    begun = [
        _begin(registry, request) if isinstance(request, ModelRequest) else request
        for request in requests
    ]
    under_way = [asyncio.ensure_future(_whole(job, registry)) for _, job in _jobs(begun)]
    if under_way:
        await asyncio.wait(under_way, timeout=max(0.0, seconds))
    for task, (route, job) in zip(under_way, _jobs(begun), strict=True):
        if not task.done():
            task.cancel()
            route.leave(job)
    answers = iter(under_way)
    return [each if isinstance(each, TsxError) else _outcome(next(answers)) for each in begun]


def _begin(registry: Registry, request: ModelRequest) -> tuple[Route, WaitingJob] | TsxError:
    try:
        headers = [
            (name.encode("latin-1", "replace"), text.encode("latin-1", "replace"))
            for name, text in request.headers
        ]
        if wrong := [name for name, value in headers if not is_header(name, value)]:
            raise BadRequest(
                f"The request has headers that HTTP does not allow: {wrong}. Send it without them."
            )
        check_distinct(headers)
        route = resolve(registry, Target(request.model), headers)
        shown = shown_headers(headers, registry.hidden_headers.of(route.name))
        job = WaitingJob(
            wire.request_meta(new_request_id().decode(), b"", shown), request.body, time.monotonic()
        )
        route.submit(job)
    except TsxError as error:
        return error
    return route, job


def _jobs(begun: Sequence[tuple[Route, WaitingJob] | TsxError]) -> list[tuple[Route, WaitingJob]]:
    return [each for each in begun if not isinstance(each, TsxError)]


async def _whole(job: WaitingJob, registry: Registry) -> ModelAnswer:
    answer = await job.done
    body = await answer.read_all(registry.settings.max_response_size)
    kind = next(
        (
            value.decode("latin-1")
            for name, value in handler_headers(answer.headers)
            if name == b"content-type"
        ),
        "",
    )
    return ModelAnswer(answer.status, kind or looks_like(body), body)


def _outcome(task: asyncio.Task[ModelAnswer]) -> ModelAnswer | TsxError:
    if not task.done() or task.cancelled():
        return too_late()
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, TsxError):
        return error
    raise error


class SqsBatches:
    """Events of SQS. Their messages are one batch, or several by the model's batch size."""

    def __init__(
        self, registry: Registry, place: str, results: ResultSender, late: Callable[[], object]
    ) -> None:
        """`late` is called where there was no time for a message."""
        self._registry = registry
        self._late = late
        self._place = place
        self._results = results

    async def answer(self, event: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Which messages are to be delivered again:
        https://docs.aws.amazon.com/lambda/latest/dg/services-sqs-errorhandling.html
        """
        end = time.monotonic() + seconds
        records: list[Mapping[str, Any]] = event["Records"]
        asking = seconds * (1 - SENDING) if self._place else seconds
        answers = await answer_all(self._registry, [_message(record) for record in records], asking)
        if any(isinstance(answer, TooLate) for answer in answers):
            self._late()
        failed = {
            record["messageId"]: why
            for record, answer in zip(records, answers, strict=True)
            if (why := _why_failed(answer))
        }
        held_back = set(events.ordered_failures(records, set(failed)))
        going = [
            (record, answer)
            for record, answer in zip(records, answers, strict=True)
            if record["messageId"] not in held_back
        ]
        failed |= await self._send(
            [(record, answer) for record, answer in going if isinstance(answer, ModelAnswer)], end
        )
        for message, why in failed.items():
            logger.error("message %s failed and will be delivered again: %s", message, why)
        return {
            "batchItemFailures": [
                {"itemIdentifier": message}
                for message in events.ordered_failures(records, set(failed))
            ]
        }

    async def _send(
        self, answered: Sequence[tuple[Mapping[str, Any], ModelAnswer]], end: float
    ) -> dict[str, str]:
        """The messages whose answers could not be sent, and why.

        Those of a FIFO group one after the other.
        """
        if not self._place:
            return {}
        if any(events.group_of(record) for record, _ in answered):
            return await self._send_in_order(answered, end)
        sent = await asyncio.gather(
            *(self._send_one(record, answer, end) for record, answer in answered)
        )
        return {message: why for each in sent for message, why in each.items()}

    async def _send_in_order(
        self, answered: Sequence[tuple[Mapping[str, Any], ModelAnswer]], end: float
    ) -> dict[str, str]:
        failed: dict[str, str] = {}
        stopped: set[str] = set()
        for record, answer in answered:
            if events.group_of(record) not in stopped and (
                why := await self._send_one(record, answer, end)
            ):
                failed |= why
                stopped.add(events.group_of(record))
        return failed

    async def _send_one(
        self, record: Mapping[str, Any], answer: ModelAnswer, end: float
    ) -> dict[str, str]:
        message = record["messageId"]
        place = events.result_place(record) if self._place == MESSAGE else self._place
        if not place:
            return {}
        if not is_place(place):
            return {
                message: (
                    f"its attribute tsx-results is '{place}', which is neither s3://BUCKET/PREFIX"
                    " nor the URL of a queue"
                )
            }
        try:
            result = Result(
                message, events.group_of(record), answer.status, answer.content_type, answer.body
            )
            await asyncio.wait_for(
                self._results.send(place, result), max(0.0, end - time.monotonic())
            )
        except (
            Exception
        ) as error:  # the boundary of a message: whatever boto3 raises, the others go on
            logger.exception("the answer to message %s cannot be sent to %s", message, place)
            return {message: f"its answer cannot be sent to {place}: {error!r}"}
        return {}


def _message(record: Mapping[str, Any]) -> ModelRequest | TsxError:
    try:
        return events.message(record)
    except TsxError as error:
        return error


def _why_failed(answer: ModelAnswer | TsxError) -> str:
    """Empty for a success."""
    if isinstance(answer, TsxError):
        return answer.message
    return (
        ""
        if answer.status < 400
        else f"{answer.status} {answer.body[:500].decode('utf-8', 'replace').strip()}"
    )
