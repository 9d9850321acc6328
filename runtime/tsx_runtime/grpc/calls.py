"""A call to a model, from the queue to the answer: code that the inference services share."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any, cast

import grpc

from tsx_runtime import wire
from tsx_runtime.api.headers import Pair, check_status, new_request_id, shown_headers
from tsx_runtime.api.request_options import deadline, priority_and_timeout
from tsx_runtime.core.isolation.hidden_credentials import HiddenHeaders
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Answer, Route, WaitingJob
from tsx_runtime.core.telemetry.tracing import current
from tsx_runtime.core.traffic.splitter import VERSION_HEADER
from tsx_runtime.errors import TsxError
from tsx_runtime.grpc.admission import current_call
from tsx_runtime.grpc.messages import as_headers, from_block
from tsx_runtime.grpc.statuses import STATUS, CallRefused, worker_refusal
from tsx_runtime.wire import Body

Context = grpc.aio.ServicerContext[Any, Any]


class PendingRequest:
    """One request of a call.

    Leaving the `with` early gives up its place in the queue, or its stream.
    """

    def __init__(
        self, context: Context, route: Route, own: Iterable[Pair], body: Body, hidden: HiddenHeaders
    ) -> None:
        """`own`: headers beside those of the call's metadata; the handler sees none that are
        `hidden`.

        Raises BadRequest for a priority in the metadata that is none.

        The body counts against `max_inflight_bytes` until `leave`; Unavailable where it does not
        fit.
        """
        request_id = new_request_id()
        headers = as_headers(context.invocation_metadata() or ())
        priority, timeout_ms = priority_and_timeout(headers)
        route = route.by_head(headers)
        now = time.monotonic()
        due = deadline(now, route.client_timeout, timeout_ms)
        remaining = context.time_remaining()
        if remaining is not None:
            due = now + remaining if due is None else min(due, now + remaining)
        self.id = request_id.decode()
        shown = shown_headers(headers, hidden.of(route.name))
        self.route = route
        self.job = WaitingJob(
            wire.request_meta(self.id, b"", [*shown, *own]), body, now, due, priority
        )
        self._answer: Answer | None = None
        if (span := current.get()) is not None:
            self.job.trace(span, route)
        self._budget, self._held = current_call.get().budget, len(body)
        self._budget.take(self._held)
        try:
            route.submit(self.job)
        except BaseException:
            self._give()
            raise

    @property
    def version(self) -> ModelVersion:
        """The version serving this request: picked by the splitter, or addressed directly."""
        routed = self.job.routed
        return cast("ModelVersion", self.route if routed is None else routed)

    async def answer(self) -> Answer:
        """The answer, or the first part of one that streams.

        Raises TsxError, and `CallRefused` with the worker's reason.
        """
        self._answer = answer = await self.job.done
        check_status(answer.status)
        if (
            answer.status >= 400
            and not answer.streamed
            and (refusal := worker_refusal(answer.status, answer.body))
        ):
            raise CallRefused(refusal)
        return answer

    def leave(self) -> None:
        """The client no longer waits. Has no effect on a request that is answered."""
        self._give()
        done = self.job.done
        if not done.done() or done.cancelled():
            done.cancel()
            self.route.leave(self.job)
        else:
            done.exception()  # asyncio logs errors that were never retrieved
        if self._answer is not None and self._answer.streamed:
            self.route.leave(self.job)
            self._answer.leave()

    def _give(self) -> None:
        size, self._held = self._held, 0
        self._budget.give(size)

    def __enter__(self) -> PendingRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


async def whole_answer(context: Context, pending: PendingRequest) -> tuple[Answer, bytes]:
    """The answer and its body, its headers sent to the client as metadata."""
    answer = await _first(context, pending)
    await send_headers(context, pending, answer)
    return answer, await answer.whole(pending.version.max_response_size)


async def answer_parts(
    context: Context, pending: PendingRequest
) -> AsyncGenerator[tuple[Answer, bytes], None]:
    """The answer, and each part of it as it comes. The worker is held while its client is
    slower.
    """
    answer = await _first(context, pending)
    await send_headers(context, pending, answer)
    async for part in answer.parts():
        yield answer, part


async def _first(context: Context, pending: PendingRequest) -> Answer:
    """As `PendingRequest.answer`. A refusal carries the version, where a split had picked one."""
    context.set_trailing_metadata((("x-request-id", pending.id),))
    try:
        return await pending.answer()
    except (TsxError, CallRefused):
        if pending.job.routed is not None:
            context.set_trailing_metadata(
                (("x-request-id", pending.id), (VERSION_HEADER.decode(), pending.version.version))
            )
        raise


async def send_headers(context: Context, pending: PendingRequest, answer: Answer) -> None:
    """The handler's headers and status, as metadata.

    Sent only where there are some: it costs a write of its own.
    """
    headers = from_block(answer.headers)
    if answer.status != 200:
        headers = ((STATUS, str(answer.status)), *headers)
    if headers:
        await context.send_initial_metadata((("x-request-id", pending.id), *headers))
