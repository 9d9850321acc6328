"""Requests of gRPC calls to models: the code that both inference services use."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any, cast

import grpc

from tsx_runtime import wire
from tsx_runtime.api.headers import Pair, check_status, new_request_id, shown_headers
from tsx_runtime.api.request_options import deadline, priority_and_timeout
from tsx_runtime.core.hidden_credentials import HiddenHeaders
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Answer, Route, WaitingJob
from tsx_runtime.core.telemetry.tracing import current
from tsx_runtime.core.traffic.splitter import VERSION_HEADER
from tsx_runtime.errors import TsxError
from tsx_runtime.features.grpc.admission import current_call
from tsx_runtime.features.grpc.messages import block_to_metadata, metadata_to_headers
from tsx_runtime.features.grpc.statuses import STATUS_KEY, CallRefused, worker_refusal
from tsx_runtime.wire import Body

Context = grpc.aio.ServicerContext[Any, Any]


class PendingRequest:
    """One request of a call; leaving its `with` block early withdraws it."""

    def __init__(
        self,
        context: Context,
        route: Route,
        route_headers: Iterable[Pair],
        body: Body,
        hidden: HiddenHeaders,
    ) -> None:
        """Submit a request; its body counts against `max_inflight_bytes` until `leave`.

        Args:
            context: The context of the call.
            route: The route of the model.
            route_headers: Headers in addition to the call's metadata.
            body: The body of the request.
            hidden: The headers that handlers do not see.

        Raises:
            BadRequest: The metadata has an invalid priority or timeout.
            Unavailable: `max_inflight_bytes` has no room for the body.
        """
        request_id = new_request_id()
        headers = metadata_to_headers(context.invocation_metadata() or ())
        priority, timeout_ms = priority_and_timeout(headers)
        route = route.route_for_headers(headers)
        now = time.monotonic()
        expires_at = deadline(now, route.client_timeout, timeout_ms)
        remaining = context.time_remaining()
        if remaining is not None:
            expires_at = now + remaining if expires_at is None else min(expires_at, now + remaining)
        self.id = request_id.decode()
        visible_headers = shown_headers(headers, hidden.for_model(route.name))
        self.route = route
        self.job = WaitingJob(
            wire.request_meta(self.id, b"", [*visible_headers, *route_headers]),
            body,
            now,
            expires_at,
            priority,
        )
        self._answer: Answer | None = None
        if (span := current.get()) is not None:
            self.job.trace(span, route)
        self._budget, self._counted_bytes = current_call.get().budget, len(body)
        self._budget.take(self._counted_bytes)
        try:
            route.submit(self.job)
        except BaseException:
            self._release_bytes()
            raise

    @property
    def version(self) -> ModelVersion:
        """The version that serves this request: chosen by the splitter or by the client."""
        routed = self.job.routed
        return cast("ModelVersion", self.route if routed is None else routed)

    async def answer(self) -> Answer:
        """Return the response, or the first part of a streamed one.

        Raises:
            CallRefused: The worker reports an error.
            TsxError: The request failed in another way.
        """
        self._answer = answer = await self.job.done
        check_status(answer.status)
        if (
            answer.status >= 400
            and not answer.is_streamed
            and (refusal := worker_refusal(answer.status, answer.body))
        ):
            raise CallRefused(refusal)
        return answer

    def leave(self) -> None:
        """Withdraw a request whose client no longer waits, unless it is answered."""
        self._release_bytes()
        future = self.job.done
        if not future.done() or future.cancelled():
            future.cancel()
            self.route.leave(self.job)
        else:
            future.exception()  # Otherwise asyncio would log the error.
        if self._answer is not None and self._answer.is_streamed:
            self.route.leave(self.job)
            self._answer.leave()

    def _release_bytes(self) -> None:
        size, self._counted_bytes = self._counted_bytes, 0
        self._budget.give(size)

    def __enter__(self) -> PendingRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


async def complete_answer(context: Context, pending: PendingRequest) -> tuple[Answer, bytes]:
    """Send the response's headers as metadata, and return the response and its body."""
    answer = await _first_answer(context, pending)
    await send_headers(context, pending, answer)
    return answer, await answer.read_all(pending.version.max_response_size)


async def answer_parts(
    context: Context, pending: PendingRequest, *, has_sent: bool = False
) -> AsyncGenerator[tuple[Answer, bytes], None]:
    """Yield the response with each of its parts, as fast as the client reads them.

    With `has_sent`, the call has sent a message. Its metadata went before that, so the response's
    headers are dropped.
    """
    answer = await _first_answer(context, pending)
    if not has_sent:
        await send_headers(context, pending, answer)
    async for part in answer.parts():
        yield answer, part


async def _first_answer(context: Context, pending: PendingRequest) -> Answer:
    """Return the response; an error's metadata has the version if a splitter chose one."""
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
    """Send the handler's headers and status as metadata.

    If there are none, no metadata is sent, because this would cost a separate write.
    """
    headers = block_to_metadata(answer.headers)
    if answer.status != 200:
        headers = ((STATUS_KEY, str(answer.status)), *headers)
    if headers:
        await context.send_initial_metadata((("x-request-id", pending.id), *headers))
