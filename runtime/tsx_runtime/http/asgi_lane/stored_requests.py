"""Submits stored requests to their models, as the lane submits those whose clients wait."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

from tsx_runtime import wire
from tsx_runtime.api import errors
from tsx_runtime.api.headers import check_status, handler_headers, header_pairs
from tsx_runtime.api.urls import find_target, resolve, with_headers
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.byte_budget import UNCOUNTED
from tsx_runtime.core.scheduling.job import Route, WaitingJob
from tsx_runtime.core.traffic.splitter import VERSION_HEADER
from tsx_runtime.errors import DeadlinePassed, TsxError, Unavailable
from tsx_runtime.jobs.service import Jobs, make_store
from tsx_runtime.jobs.store import JobRecord, JobTarget, StoredAnswer, StoredRequest
from tsx_runtime.settings.schema import Settings

WORKER_SHARE = 0.5  # share of the requests in a model's workers that may be asynchronous
BEHIND = 1000  # by which its priority is below that of a request whose client waits


def make_jobs(registry: Registry, settings: Settings) -> Jobs | None:
    """None where nothing is stored. Raises SettingError."""
    store = make_store(settings, registry.state.directory)
    if store is None:
        return None
    jobs = Jobs(
        settings, store, RequestExecutor(registry, settings.max_response_size, store.request)
    )
    registry.on_readiness.append(jobs.runner.changed)
    return jobs


class RequestExecutor:
    """A `JobExecutor` for the models of a registry."""

    def __init__(
        self,
        registry: Registry,
        largest: int,
        load: Callable[[str], Awaitable[StoredRequest | None]],
    ) -> None:
        """`largest`: bytes of the parts of a streamed answer, together."""
        self._registry = registry
        self._largest = largest
        self._load = load

    def places(self, target: JobTarget) -> int | None:
        name, version = target
        try:
            found = self._registry.find(name, version or None)
        except TsxError:
            return 0 if self._registry.unloaded_of(name, version or None) else None
        return math.ceil(
            max(len(found.workers), found.asleep) * max(1, found.batch_size) * WORKER_SHARE
        )

    async def answer(self, job: JobRecord) -> StoredAnswer:
        if (
            job.deadline is not None and not time.time() <= job.deadline < math.inf
        ):  # NaN and infinity suit no timer
            return _refusal(
                DeadlinePassed(
                    "The job was not started before the time that its client gave it"
                    " (x-tsx-timeout-ms)."
                ),
                "",
            )
        counted = job.size if job.size > UNCOUNTED else 0
        self._registry.bytes_in_flight.take(counted)
        try:
            request = await self._load(job.id)
            if request is None:  # it was cancelled, and has expired
                return _refusal(Unavailable("The request is not stored any more."), "")
            return await self._run(job, request)
        finally:
            self._registry.bytes_in_flight.give(counted)

    async def _run(self, job: JobRecord, request: StoredRequest) -> StoredAnswer:
        submitted = None
        try:
            route, submitted = self._submittable(job, request)
            return await _answered(route, submitted, request.path, self._largest)
        except Unavailable as error:
            if not isinstance(error, DeadlinePassed):
                raise
            return _refusal(error, request.path, submitted)
        except TsxError as error:
            return _refusal(error, request.path, submitted)
        except Exception as error:  # the boundary of a request
            return _refusal(
                errors.unexpected(error, request.request_id.encode()), request.path, submitted
            )

    def _submittable(self, job: JobRecord, request: StoredRequest) -> tuple[Route, WaitingJob]:
        headers = header_pairs(request.headers)
        target = find_target(request.path, request.query)
        assert target is not None  # it was when the request was stored
        target = target._replace(
            name=job.model, version=job.version or None if target.in_body else target.version
        )
        route = resolve(self._registry, target, [(name.lower(), value) for name, value in headers])
        meta = wire.request_meta(
            request.request_id,
            request.query if target.query else b"",
            with_headers(headers, target, self._registry.hidden_headers.of(route.name)),
        )
        now = time.monotonic()
        due = None if job.deadline is None else now + job.deadline - time.time()
        return route, WaitingJob(meta, request.body, now, due, job.priority - BEHIND)


async def _answered(route: Route, job: WaitingJob, path: str, largest: int) -> StoredAnswer:
    route.submit(job)
    try:
        answer = await job.done
    except BaseException:
        route.leave(job)  # without effect where it was refused
        raise
    check_status(answer.status)
    headers = handler_headers(answer.headers)
    try:
        body = await answer.whole(largest)
    finally:
        job.gone = True
        answer.leave()
    if answer.status >= 400 and (form := errors.form_of_path(path)) is not None:
        body = form(body)
    return StoredAnswer(answer.status, wire.header_block(headers), body)


def _refusal(error: TsxError, path: str, job: WaitingJob | None = None) -> StoredAnswer:
    status, headers, body = errors.fault(error, path)
    if job is not None and job.routed is not None:
        headers = (*headers, (VERSION_HEADER, job.routed.version.encode()))
    return StoredAnswer(status, wire.header_block(headers), body)
