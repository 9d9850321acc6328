"""The inference routes that run a model: turn an ASGI request into a job, and its answer into a
response.

Predictions are answered straight on ASGI: no framework's request, no dependencies, no validation
lie on their path. What the body means is the worker's business; here it is bytes.
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
from tsx_runtime.api.access_log import BROKEN, ENDED, SERVED
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
    as_sent,
    read_body,
    request_id_of,
    rest_of,
    send_whole,
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
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Answer, Route, WaitingJob
from tsx_runtime.core.telemetry.tracing import current
from tsx_runtime.core.traffic.splitter import VERSION_HEADER
from tsx_runtime.errors import ClientLeft, MethodNotAllowed, TsxError
from tsx_runtime.metrics.response_counts import ResponseCounts

logger = logging.getLogger("tsx.http")


@dataclass(eq=False)
class Predictions:
    """The routes of `urls.py`, any verb (contract 1.2)."""

    registry: Registry
    limit: int
    guard: Guard | None
    counts: ResponseCounts
    describe: Callable[[str], dict[str, Any]]  # the OpenAPI document of one model
    timing_share: float = 0.0  # of the answers that have `Server-Timing` without being asked for it
    confined: bool = False  # see `answer_headers`

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
            scope[SERVED] = route, job = await self._job(scope, receive, request_id)
            if (span := current.get()) is not None:
                job.trace(span, route)
            answer = await _answer(route, job, receive)
            check_status(answer.status)
            headers = answer_headers(
                answer.status, handler_headers(answer.headers), confined=self.confined
            )
        except (ClientGone, ClientLeft):
            return
        except TsxError as error:
            status, pairs, body = errors.fault(error, scope["path"])
            await self._send(
                send,
                scope,
                request_id,
                status,
                (*pairs, *_routed(scope)),
                body,
                rest_of(error, receive),
            )
        except Exception as error:  # the boundary of a request
            await self._send(
                send, scope, request_id, *errors.fault(errors.unexpected(error, request_id))
            )
        else:
            if answer.streamed:
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

    async def _job(
        self, scope: Scope, receive: Receive, request_id: bytes
    ) -> tuple[Route, WaitingJob]:
        """The request as a job, and its route."""
        headers: list[Pair] = scope["headers"]
        priority, timeout_ms = priority_and_timeout(headers)
        target, route, body = await read_request(self.registry, scope, receive, self.limit)
        now = time.monotonic()
        shown = with_headers(as_sent(scope), target, self.registry.hidden_headers.of(route.name))
        meta = wire.request_meta(
            request_id.decode(), scope["query_string"] if target.query else b"", shown
        )
        due = deadline(now, route.client_timeout, timeout_ms)
        timing = parse_timing_request(headers)
        if timing is None and self.timing_share and random.random() < self.timing_share:
            timing = TIMED
        job = WaitingJob(meta, body, now, due, priority)
        job.destination = route
        if timing is not None:
            job.on_times = partial(timing_header, timing)
        return route, job

    async def _options(self, scope: Scope, send: Send, request_id: bytes) -> None:
        target = find_target(scope["path"], scope["query_string"])
        assert target is not None
        body = (
            json.dumps(self.describe(resolve(self.registry, target).name), indent=2).encode()
            + b"\n"
        )
        await self._send(send, scope, request_id, 200, (JSON, *NO_CACHE), body)

    async def _send(
        self,
        send: Send,
        scope: Scope,
        request_id: bytes,
        status: int,
        headers: tuple[Pair, ...],
        body: bytes,
        rest: Receive | None = None,
    ) -> None:
        self.counts.add(status)
        if status >= 400 and (form := errors.form_of_path(scope["path"])) is not None:
            body = form(body)
        await send_whole(send, scope, status, headers, request_id, body, rest)

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
        """Each part as one chunk.

        One that breaks off ends without its last chunk, so that the client can tell; events, with
        an error.
        """
        shows = scope["method"] != "HEAD"
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        watcher = asyncio.ensure_future(_watch(receive, route, job, answer))
        try:
            async for part in answer.parts():
                if job.gone:
                    return
                if part and shows:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except TsxError as error:
            if job.gone:  # its client has left, and so the worker has stopped
                return
            scope[ENDED] = BROKEN
            request_id = headers[0][1].decode()
            about = {"request_id": request_id, "model": route.name}
            logger.warning(
                "request %s: its stream was interrupted: %s", request_id, error.message, extra=about
            )
            if shows and errors.is_event_stream(answer.headers):
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
    """What a request asks for, where it is submitted, and its body.

    Raises as `resolve` and `read_body` do.
    """
    headers: list[Pair] = scope["headers"]
    target = find_target(scope["path"], scope["query_string"])
    assert target is not None
    form = target.name is None and is_form(headers)
    if not form and not target.in_body:
        resolve(registry, target)  # before the body, which would come for nothing
    body = await read_body(scope, receive, limit, field_counter(headers) if form else None, setting)
    if target.in_body:
        target = with_model(registry, target, headers, body)
    elif form:
        target = target._replace(name=model_in_form(headers, body))
    return (
        target,
        resolve(registry, target, headers),
        body,
    )  # not before: it may be unregistered while the body comes


def _routed(scope: Scope) -> tuple[Pair, ...]:
    """The version that the splitter picked, for the answer to a request that this version
    refuses.
    """
    version = scope[SERVED][1].routed if SERVED in scope else None
    return () if version is None else ((VERSION_HEADER, version.version.encode()),)


async def _answer(route: Route, job: WaitingJob, receive: Receive) -> Answer:
    """Submit the job and wait for its answer; raises `ClientLeft` where it is given up because the
    client has left.
    """
    route.submit(job)
    leaving = asyncio.ensure_future(_watch_wait(receive, route, job))
    try:
        return await job.done
    except asyncio.CancelledError:
        route.leave(job)
        raise
    finally:
        leaving.cancel()


async def _watch_wait(receive: Receive, route: Route, job: WaitingJob) -> None:
    """Withdraw the job when its client leaves. After the body, nothing else is to be received."""
    if (await receive())["type"] == "http.disconnect":
        route.leave(job)


async def _watch(receive: Receive, route: Route, job: WaitingJob, answer: Answer) -> None:
    """Tell the job when its client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    route.leave(job)
    answer.leave()
