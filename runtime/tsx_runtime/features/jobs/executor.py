"""The executor of asynchronous requests, which submits stored requests to their models."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

from tsx_runtime import wire
from tsx_runtime.api import errors
from tsx_runtime.api.headers import check_status, handler_headers, header_pairs
from tsx_runtime.api.urls import find_target, resolve, with_headers
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.byte_budget import MAX_UNCOUNTED_BYTES
from tsx_runtime.core.scheduling.job import Route, WaitingJob
from tsx_runtime.core.traffic.splitter import VERSION_HEADER
from tsx_runtime.errors import DeadlinePassed, TsxError, Unavailable
from tsx_runtime.features.jobs.storage.store import (
    JobRecord,
    JobTarget,
    StoredAnswer,
    StoredRequest,
)

MAX_WORKER_SHARE = 0.5  # largest fraction of a model's running requests that may be asynchronous
PRIORITY_PENALTY = 1000  # lower priority than that of any request whose client waits


class RequestExecutor:
    """A `JobExecutor` that runs jobs on the models of a registry."""

    def __init__(
        self,
        registry: Registry,
        max_size: int,
        load: Callable[[str], Awaitable[StoredRequest | None]],
    ) -> None:
        """Create an executor; `load` reads requests, and streams have at most `max_size` bytes."""
        self._registry = registry
        self._max_size = max_size
        self._load = load

    def capacity(self, target: JobTarget) -> int | None:
        """Return the number of jobs that a model may run at once, or None if it is unknown."""
        name, version = target
        try:
            model = self._registry.find(name, version or None)
        except TsxError:
            return 0 if self._registry.not_loaded_of(name, version or None) else None
        return math.ceil(
            max(len(model.workers), model.asleep) * max(1, model.batch_size) * MAX_WORKER_SHARE
        )

    async def answer(self, job: JobRecord) -> StoredAnswer:
        """Run a stored request, and return its answer or its error."""
        # NaN and infinity count as expired, because a timer does not accept them.
        if job.deadline is not None and not time.time() <= job.deadline < math.inf:
            return _error_answer(
                DeadlinePassed(
                    "The job was not started before the time that its client gave it"
                    " (x-tsx-timeout-ms)."
                ),
                "",
            )
        counted_bytes = job.size if job.size > MAX_UNCOUNTED_BYTES else 0
        self._registry.bytes_in_flight.take(counted_bytes)
        try:
            request = await self._load(job.id)
            if request is None:  # The job was cancelled, and its request has expired.
                return _error_answer(Unavailable("The request is not stored any more."), "")
            return await self._run(job, request)
        finally:
            self._registry.bytes_in_flight.give(counted_bytes)

    async def _run(self, job: JobRecord, request: StoredRequest) -> StoredAnswer:
        waiting_job = None
        try:
            route, waiting_job = self._build_job(job, request)
            return await _run_job(route, waiting_job, request.path, self._max_size)
        except Unavailable as error:
            if not isinstance(error, DeadlinePassed):
                raise
            return _error_answer(error, request.path, waiting_job)
        except Exception as error:  # the boundary of a request
            refusal = errors.to_tsx_error(error, request.request_id.encode())
            return _error_answer(refusal, request.path, waiting_job)

    def _build_job(self, job: JobRecord, request: StoredRequest) -> tuple[Route, WaitingJob]:
        headers = header_pairs(request.headers)
        target = find_target(request.path, request.query)
        assert target is not None  # The path was checked when the request was stored.
        target = target._replace(
            name=job.model, version=job.version or None if target.in_body else target.version
        )
        route = resolve(self._registry, target, [(name.lower(), value) for name, value in headers])
        meta = wire.request_meta(
            request.request_id,
            request.query if target.query else b"",
            with_headers(headers, target, self._registry.hidden_headers.for_model(route.name)),
        )
        now = time.monotonic()
        expires_at = None if job.deadline is None else now + job.deadline - time.time()
        return route, WaitingJob(
            meta, request.body, now, expires_at, job.priority - PRIORITY_PENALTY
        )


async def _run_job(route: Route, job: WaitingJob, path: str, max_size: int) -> StoredAnswer:
    route.submit(job)
    try:
        answer = await job.done
    except BaseException:
        route.leave(job)  # For a job that was refused, this does nothing.
        raise
    check_status(answer.status)
    headers = handler_headers(answer.headers)
    try:
        body = await answer.read_all(max_size)
    finally:
        job.gone = True
        answer.leave()
    if answer.status >= 400 and (form := errors.converter_for_path(path)) is not None:
        body = form(body)
    return StoredAnswer(answer.status, wire.header_block(headers), body)


def _error_answer(error: TsxError, path: str, job: WaitingJob | None = None) -> StoredAnswer:
    status, headers, body = errors.error_response(error, path)
    if job is not None and job.routed is not None:
        headers = (*headers, (VERSION_HEADER, job.routed.version.encode()))
    return StoredAnswer(status, wire.header_block(headers), body)
