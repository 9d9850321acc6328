"""The answering of events that are not HTTP requests.

The requests of one event are submitted to the model together, so that they form batches.
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
from tsx_runtime.targets.aws_lambda.http_events import TooLate, timeout_error
from tsx_runtime.targets.aws_lambda.results import Result, ResultSender

# Fraction of an invocation's time that is reserved for sending answers. If an answer could not be
# sent, its message is delivered again.
SENDING_SHARE = 0.1
MESSAGE = "message"  # a value of TSX_LAMBDA_RESULTS: each message names its own destination

logger = logging.getLogger("tsx.lambda")


class ModelAnswer(NamedTuple):
    status: int
    content_type: str
    body: bytes


async def answer_all(
    registry: Registry, requests: Sequence[ModelRequest | TsxError], seconds: float
) -> list[ModelAnswer | TsxError]:
    """Return the answers in the order of the requests.

    Requests that take longer than `seconds` are withdrawn. Errors among `requests` are returned
    unchanged.
    """
    submissions = [
        _submit(registry, request) if isinstance(request, ModelRequest) else request
        for request in requests
    ]
    tasks = [asyncio.ensure_future(_read_answer(job, registry)) for _, job in _jobs(submissions)]
    if tasks:
        await asyncio.wait(tasks, timeout=max(0.0, seconds))
    for task, (route, job) in zip(tasks, _jobs(submissions), strict=True):
        if not task.done():
            task.cancel()
            route.leave(job)
    answers = iter(tasks)
    return [
        entry if isinstance(entry, TsxError) else _outcome(next(answers)) for entry in submissions
    ]


def _submit(registry: Registry, request: ModelRequest) -> tuple[Route, WaitingJob] | TsxError:
    try:
        headers = [
            (name.encode("latin-1", "replace"), text.encode("latin-1", "replace"))
            for name, text in request.headers
        ]
        if invalid_names := [name for name, value in headers if not is_header(name, value)]:
            raise BadRequest(
                f"The request has headers that HTTP does not allow: {invalid_names}. Send it"
                " without them."
            )
        check_distinct(headers)
        route = resolve(registry, Target(request.model), headers)
        visible_headers = shown_headers(headers, registry.hidden_headers.for_model(route.name))
        job = WaitingJob(
            wire.request_meta(new_request_id().decode(), b"", visible_headers),
            request.body,
            time.monotonic(),
        )
        route.submit(job)
    except TsxError as error:
        return error
    return route, job


def _jobs(
    submissions: Sequence[tuple[Route, WaitingJob] | TsxError],
) -> list[tuple[Route, WaitingJob]]:
    return [entry for entry in submissions if not isinstance(entry, TsxError)]


async def _read_answer(job: WaitingJob, registry: Registry) -> ModelAnswer:
    answer = await job.done
    body = await answer.read_all(registry.settings.max_response_size)
    content_type = next(
        (
            value.decode("latin-1")
            for name, value in handler_headers(answer.headers)
            if name == b"content-type"
        ),
        "",
    )
    return ModelAnswer(answer.status, content_type or looks_like(body), body)


def _outcome(task: asyncio.Task[ModelAnswer]) -> ModelAnswer | TsxError:
    if not task.done() or task.cancelled():
        return timeout_error()
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, TsxError):
        return error
    raise error


class SqsBatches:
    """An object that answers SQS events, whose messages form one or several batches."""

    def __init__(
        self,
        registry: Registry,
        destination: str,
        results: ResultSender,
        report_timeout: Callable[[], object],
    ) -> None:
        """Send answers to `destination`, if any; call `report_timeout` after a timeout."""
        self._registry = registry
        self._report_timeout = report_timeout
        self._destination = destination
        self._results = results

    async def answer(self, event: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Answer an event, and return the ids of messages that must be delivered again.

        https://docs.aws.amazon.com/lambda/latest/dg/services-sqs-errorhandling.html
        """
        deadline = time.monotonic() + seconds
        records: list[Mapping[str, Any]] = event["Records"]
        answer_seconds = seconds * (1 - SENDING_SHARE) if self._destination else seconds
        answers = await answer_all(
            self._registry, [_read_request(record) for record in records], answer_seconds
        )
        if any(isinstance(answer, TooLate) for answer in answers):
            self._report_timeout()
        failure_reasons = {
            record["messageId"]: reason
            for record, answer in zip(records, answers, strict=True)
            if (reason := _failure_reason(answer))
        }
        unsent_ids = set(events.ordered_failures(records, set(failure_reasons)))
        remaining = [
            (record, answer)
            for record, answer in zip(records, answers, strict=True)
            if record["messageId"] not in unsent_ids
        ]
        failure_reasons |= await self._send(
            [(record, answer) for record, answer in remaining if isinstance(answer, ModelAnswer)],
            deadline,
        )
        for message_id, reason in failure_reasons.items():
            logger.error("message %s failed and will be delivered again: %s", message_id, reason)
        return {
            "batchItemFailures": [
                {"itemIdentifier": message_id}
                for message_id in events.ordered_failures(records, set(failure_reasons))
            ]
        }

    async def _send(
        self, answered_records: Sequence[tuple[Mapping[str, Any], ModelAnswer]], deadline: float
    ) -> dict[str, str]:
        """Send the answers, and return the failures: a reason by message id.

        If the messages come from a FIFO queue, their answers are sent in order.
        """
        if not self._destination:
            return {}
        if any(events.group_of(record) for record, _ in answered_records):
            return await self._send_in_order(answered_records, deadline)
        failures = await asyncio.gather(
            *(self._send_one(record, answer, deadline) for record, answer in answered_records)
        )
        return {
            message_id: reason for failure in failures for message_id, reason in failure.items()
        }

    async def _send_in_order(
        self, answered_records: Sequence[tuple[Mapping[str, Any], ModelAnswer]], deadline: float
    ) -> dict[str, str]:
        failure_reasons: dict[str, str] = {}
        stopped_groups: set[str] = set()
        for record, answer in answered_records:
            if events.group_of(record) not in stopped_groups and (
                failure := await self._send_one(record, answer, deadline)
            ):
                failure_reasons |= failure
                stopped_groups.add(events.group_of(record))
        return failure_reasons

    async def _send_one(
        self, record: Mapping[str, Any], answer: ModelAnswer, deadline: float
    ) -> dict[str, str]:
        message_id = record["messageId"]
        destination = (
            events.result_destination(record) if self._destination == MESSAGE else self._destination
        )
        if not destination:
            return {}
        if not is_destination(destination):
            return {
                message_id: (
                    f"its attribute tsx-results is '{destination}', which is neither"
                    " s3://BUCKET/PREFIX nor the URL of a queue"
                )
            }
        try:
            result = Result(
                message_id, events.group_of(record), answer.status, answer.content_type, answer.body
            )
            await asyncio.wait_for(
                self._results.send(destination, result), max(0.0, deadline - time.monotonic())
            )
        except Exception as error:
            # boto3 raises many kinds of errors, and none must stop the other messages.
            logger.exception(
                "the answer to message %s cannot be sent to %s", message_id, destination
            )
            return {message_id: f"its answer cannot be sent to {destination}: {error!r}"}
        return {}


def _read_request(record: Mapping[str, Any]) -> ModelRequest | TsxError:
    try:
        return events.parse_message(record)
    except TsxError as error:
        return error


def _failure_reason(answer: ModelAnswer | TsxError) -> str:
    """Return the reason why a request failed, or an empty string if it succeeded."""
    if isinstance(answer, TsxError):
        return answer.message
    return (
        ""
        if answer.status < 400
        else f"{answer.status} {answer.body[:500].decode('utf-8', 'replace').strip()}"
    )
