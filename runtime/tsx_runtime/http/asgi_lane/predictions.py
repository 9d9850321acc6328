"""The ASGI app that runs models: it converts a request to a job, and an answer to a response.

Predictions bypass FastAPI. The body is not parsed here, but in the worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tsx_runtime import wire
from tsx_runtime.api import errors, openai
from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access_log import BREAK_REASON, BROKEN, SERVED_ROUTE
from tsx_runtime.api.headers import (
    JSON,
    NO_CACHE,
    Pair,
    answer_headers,
    check_status,
    handler_headers,
)
from tsx_runtime.api.messages import (
    ClientGone,
    Receive,
    Scope,
    Send,
    cased_headers,
    read_body,
    request_id_of,
    send_whole,
    unread_body_of,
)
from tsx_runtime.api.request_options import deadline, priority_and_timeout
from tsx_runtime.api.server_timing import TIMED, parse_timing_request, timing_header
from tsx_runtime.api.urls import (
    Target,
    field_counter,
    find_target,
    is_form,
    model_in_form,
    resolve,
    with_headers,
    with_model,
)
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Answer, Route, WaitingJob
from tsx_runtime.core.telemetry.tracing import current
from tsx_runtime.core.traffic.splitter import VERSION_HEADER
from tsx_runtime.errors import ClientLeft, MethodNotAllowed, TsxError
from tsx_runtime.metrics.response_counts import ResponseCounts

logger = logging.getLogger("tsx.http")


@dataclass(eq=False)
class Predictions:
    """The prediction routes of `urls.py` with any method (`docs/reference/torchserve.md`)."""

    registry: Registry
    limit: int  # largest body in bytes
    guard: Guard | None
    counts: ResponseCounts
    describe: Callable[[ModelVersion], dict[str, Any]]  # returns the OpenAPI document of a version
    timing_share: float = (
        0.0  # fraction of responses that have `Server-Timing` without a client's request for it
    )
    is_confined: bool = False  # See `answer_headers`.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope)
        try:
            if self.guard is not None:
                self.guard.check(scope["headers"])
            if scope["path"] in openai.PATHS and scope["method"] != "POST":
                raise MethodNotAllowed(allowed=("POST",))
            if scope["method"] == "OPTIONS":
                await self._options(scope, send, request_id)
                return
            scope[SERVED_ROUTE] = route, job = await self._build_job(scope, receive, request_id)
            if (span := current.get()) is not None:
                job.trace(span, route)
            answer = await _run(route, job, receive)
            check_status(answer.status)
            headers = answer_headers(
                answer.status, handler_headers(answer.headers), is_confined=self.is_confined
            )
        except (ClientGone, ClientLeft):
            return
        except Exception as error:  # the boundary of a request
            refusal = errors.to_tsx_error(error, request_id)
            status, pairs, body = errors.error_response(refusal, scope["path"])
            await self._send(
                send,
                scope,
                request_id,
                status,
                (*pairs, *_version_header(scope)),
                body,
                unread_body_of(refusal, receive),
            )
        else:
            if answer.is_streamed:
                self.counts.add(answer.status)
                await self._stream(
                    scope,
                    receive,
                    send,
                    route,
                    job,
                    answer,
                    [(b"x-request-id", request_id), *headers],
                )
            else:
                await self._send(send, scope, request_id, answer.status, headers, answer.body)

    async def _build_job(
        self, scope: Scope, receive: Receive, request_id: bytes
    ) -> tuple[Route, WaitingJob]:
        """Read a request, and return its route and its job."""
        headers: list[Pair] = scope["headers"]
        priority, timeout_ms = priority_and_timeout(headers)
        target, route, body = await read_request(self.registry, scope, receive, self.limit)
        now = time.monotonic()
        visible_headers = with_headers(
            cased_headers(scope), target, self.registry.hidden_headers.for_model(route.name)
        )
        meta = wire.request_meta(
            request_id.decode(), scope["query_string"] if target.query else b"", visible_headers
        )
        expires_at = deadline(now, route.client_timeout, timeout_ms)
        timing = parse_timing_request(headers)
        if timing is None and self.timing_share and random.random() < self.timing_share:
            timing = TIMED
        job = WaitingJob(meta, body, now, expires_at, priority)
        job.destination = route
        if timing is not None:
            job.on_times = partial(timing_header, timing)
        return route, job

    async def _options(self, scope: Scope, send: Send, request_id: bytes) -> None:
        target = find_target(scope["path"], scope["query_string"])
        assert target is not None
        route = resolve(self.registry, target)
        version = route if isinstance(route, ModelVersion) else self.registry.find(route.name)
        body = json.dumps(self.describe(version), indent=2).encode() + b"\n"
        await self._send(send, scope, request_id, 200, (JSON, *NO_CACHE), body)

    async def _send(
        self,
        send: Send,
        scope: Scope,
        request_id: bytes,
        status: int,
        headers: tuple[Pair, ...],
        body: bytes,
        unread_body: Receive | None = None,
    ) -> None:
        self.counts.add(status)
        if status >= 400 and (form := errors.converter_for_path(scope["path"])) is not None:
            body = form(body)
        await send_whole(send, scope, status, headers, request_id, body, unread_body)

    async def _stream(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        route: Route,
        job: WaitingJob,
        answer: Answer,
        headers: list[Pair],
    ) -> None:
        """Send each part of a streamed answer as one chunk.

        If the answer breaks off, the last chunk is not sent, so that the client notices. A stream
        of server-sent events ends with an error event instead.
        """
        has_body = scope["method"] != "HEAD"
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        watcher = asyncio.ensure_future(_cancel_on_leave(receive, route, job, answer))
        try:
            async for part in answer.parts():
                if job.gone:
                    return
                if part and has_body:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except TsxError as error:
            if job.gone:  # The worker has stopped, because the client has left.
                return
            scope[BREAK_REASON] = BROKEN
            request_id = headers[0][1].decode()
            log_fields = {"request_id": request_id, "model": route.name}
            logger.warning(
                "request %s: its stream was interrupted: %s",
                request_id,
                error.message,
                extra=log_fields,
            )
            if has_body and errors.is_event_stream(answer.headers):
                await send(
                    {"type": "http.response.body", "body": errors.error_event(error.message)}
                )
        finally:
            watcher.cancel()
            job.gone = True
            answer.leave()


async def read_request(
    registry: Registry,
    scope: Scope,
    receive: Receive,
    limit: int,
    setting: str = "max_request_size",
) -> tuple[Target, Route, bytes]:
    """Return the target of a request, the route to submit it to, and its body.

    Raises:
        TsxError: `resolve` or `read_body` has refused the request.
    """
    headers: list[Pair] = scope["headers"]
    target = find_target(scope["path"], scope["query_string"])
    assert target is not None
    form = target.name is None and is_form(headers)
    if not form and not target.in_body:
        resolve(registry, target)  # This refuses an unknown model before the body is read.
    body = await read_body(scope, receive, limit, field_counter(headers) if form else None, setting)
    if target.in_body:
        target = with_model(registry, target, headers, body)
    elif form:
        target = target._replace(name=model_in_form(headers, body))
    # The model is resolved again, because it may have been unregistered while the body was read.
    return target, resolve(registry, target, headers), body


def _version_header(scope: Scope) -> tuple[Pair, ...]:
    """Return the header with the version that the splitter chose; it is added to errors too."""
    version = scope[SERVED_ROUTE][1].routed if SERVED_ROUTE in scope else None
    return () if version is None else ((VERSION_HEADER, version.version.encode()),)


async def _run(route: Route, job: WaitingJob, receive: Receive) -> Answer:
    """Submit a job and wait for its answer.

    Raises:
        ClientLeft: The job was withdrawn, because the client has left.
    """
    route.submit(job)
    leave_watcher = asyncio.ensure_future(_withdraw_on_leave(receive, route, job))
    try:
        return await job.done
    except asyncio.CancelledError:
        route.leave(job)
        raise
    finally:
        leave_watcher.cancel()


async def _withdraw_on_leave(receive: Receive, route: Route, job: WaitingJob) -> None:
    """Withdraw a waiting job once its client leaves; no other message follows the body."""
    if (await receive())["type"] == "http.disconnect":
        route.leave(job)


async def _cancel_on_leave(receive: Receive, route: Route, job: WaitingJob, answer: Answer) -> None:
    """Cancel a streaming job once its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    route.leave(job)
    answer.leave()
