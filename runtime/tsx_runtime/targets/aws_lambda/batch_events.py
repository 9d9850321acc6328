"""Requests in events other than HTTP.

The requests of one event are submitted to the model together, and so run as batches.
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
from tsx_runtime.targets.aws_lambda import events
from tsx_runtime.targets.aws_lambda.environment import is_destination
from tsx_runtime.targets.aws_lambda.events import ModelRequest
from tsx_runtime.targets.aws_lambda.http_events import TooLate, late_error
from tsx_runtime.targets.aws_lambda.results import Result, ResultSender

# Share of an invocation's time for sending answers. Messages whose answer is not sent are delivered
# again.
SENDING_SHARE = 0.1
MESSAGE = "message"  # value of TSX_LAMBDA_RESULTS: each message names the destination

logger = logging.getLogger("tsx.lambda")


class ModelAnswer(NamedTuple):
    status: int
    content_type: str
    body: bytes


async def answer_all(
    registry: Registry, requests: Sequence[ModelRequest | TsxError], seconds: float
) -> list[ModelAnswer | TsxError]:
    """Return the answers in the order of the requests.

    Requests that take longer than `seconds` are abandoned. Errors are passed through.
    """
    started = [
        _submit(registry, request) if isinstance(request, ModelRequest) else request
        for request in requests
    ]
    tasks = [asyncio.ensure_future(_read_answer(job, registry)) for _, job in _jobs(started)]
    if tasks:
        await asyncio.wait(tasks, timeout=max(0.0, seconds))
    for task, (route, job) in zip(tasks, _jobs(started), strict=True):
        if not task.done():
            task.cancel()
            route.leave(job)
    answers = iter(tasks)
    return [entry if isinstance(entry, TsxError) else _outcome(next(answers)) for entry in started]


def _submit(registry: Registry, request: ModelRequest) -> tuple[Route, WaitingJob] | TsxError:
    try:
        headers = [
            (name.encode("latin-1", "replace"), text.encode("latin-1", "replace"))
            for name, text in request.headers
        ]
        if invalid := [name for name, value in headers if not is_header(name, value)]:
            raise BadRequest(
                f"The request has headers that HTTP does not allow: {invalid}. Send it without"
                " them."
            )
        check_distinct(headers)
        route = resolve(registry, Target(request.model), headers)
        shown = shown_headers(headers, registry.hidden_headers.for_model(route.name))
        job = WaitingJob(
            wire.request_meta(new_request_id().decode(), b"", shown), request.body, time.monotonic()
        )
        route.submit(job)
    except TsxError as error:
        return error
    return route, job


def _jobs(started: Sequence[tuple[Route, WaitingJob] | TsxError]) -> list[tuple[Route, WaitingJob]]:
    return [entry for entry in started if not isinstance(entry, TsxError)]


async def _read_answer(job: WaitingJob, registry: Registry) -> ModelAnswer:
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
        return late_error()
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, TsxError):
        return error
    raise error


class SqsBatches:
    """The answering of SQS events, whose messages are one batch or several."""

    def __init__(
        self,
        registry: Registry,
        destination: str,
        results: ResultSender,
        report_late: Callable[[], object],
    ) -> None:
        """Send answers to `destination`, if any; call `report_late` if time ran out."""
        self._registry = registry
        self._report_late = report_late
        self._destination = destination
        self._results = results

    async def answer(self, event: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Answer an event, and return the messages that must be delivered again.

        https://docs.aws.amazon.com/lambda/latest/dg/services-sqs-errorhandling.html
        """
        end = time.monotonic() + seconds
        records: list[Mapping[str, Any]] = event["Records"]
        limit = seconds * (1 - SENDING_SHARE) if self._destination else seconds
        answers = await answer_all(self._registry, [_message(record) for record in records], limit)
        if any(isinstance(answer, TooLate) for answer in answers):
            self._report_late()
        failed = {
            record["messageId"]: reason
            for record, answer in zip(records, answers, strict=True)
            if (reason := _failure_reason(answer))
        }
        not_sent = set(events.ordered_failures(records, set(failed)))
        remaining = [
            (record, answer)
            for record, answer in zip(records, answers, strict=True)
            if record["messageId"] not in not_sent
        ]
        failed |= await self._send(
            [(record, answer) for record, answer in remaining if isinstance(answer, ModelAnswer)],
            end,
        )
        for message, reason in failed.items():
            logger.error("message %s failed and will be delivered again: %s", message, reason)
        return {
            "batchItemFailures": [
                {"itemIdentifier": message}
                for message in events.ordered_failures(records, set(failed))
            ]
        }

    async def _send(
        self, answered: Sequence[tuple[Mapping[str, Any], ModelAnswer]], end: float
    ) -> dict[str, str]:
        """Send the answers, and return why some messages failed.

        The answers of a FIFO queue are sent in order.
        """
        if not self._destination:
            return {}
        if any(events.group_of(record) for record, _ in answered):
            return await self._send_in_order(answered, end)
        failures = await asyncio.gather(
            *(self._send_one(record, answer, end) for record, answer in answered)
        )
        return {message: reason for failure in failures for message, reason in failure.items()}

    async def _send_in_order(
        self, answered: Sequence[tuple[Mapping[str, Any], ModelAnswer]], end: float
    ) -> dict[str, str]:
        failed: dict[str, str] = {}
        stopped: set[str] = set()
        for record, answer in answered:
            if events.group_of(record) not in stopped and (
                failure := await self._send_one(record, answer, end)
            ):
                failed |= failure
                stopped.add(events.group_of(record))
        return failed

    async def _send_one(
        self, record: Mapping[str, Any], answer: ModelAnswer, end: float
    ) -> dict[str, str]:
        message = record["messageId"]
        destination = (
            events.result_destination(record) if self._destination == MESSAGE else self._destination
        )
        if not destination:
            return {}
        if not is_destination(destination):
            return {
                message: (
                    f"its attribute tsx-results is '{destination}', which is neither"
                    " s3://BUCKET/PREFIX nor the URL of a queue"
                )
            }
        try:
            result = Result(
                message, events.group_of(record), answer.status, answer.content_type, answer.body
            )
            await asyncio.wait_for(
                self._results.send(destination, result), max(0.0, end - time.monotonic())
            )
        except Exception as error:
            # The boundary of a message: whatever boto3 raises, the others go on.
            logger.exception("the answer to message %s cannot be sent to %s", message, destination)
            return {message: f"its answer cannot be sent to {destination}: {error!r}"}
        return {}


def _message(record: Mapping[str, Any]) -> ModelRequest | TsxError:
    try:
        return events.message(record)
    except TsxError as error:
        return error


def _failure_reason(answer: ModelAnswer | TsxError) -> str:
    """Return why a request failed; empty for a success."""
    if isinstance(answer, TsxError):
        return answer.message
    return (
        ""
        if answer.status < 400
        else f"{answer.status} {answer.body[:500].decode('utf-8', 'replace').strip()}"
    )
