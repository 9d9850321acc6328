"""Asynchronous answers over HTTP: accepts a request for later, shows how far it is, gives the
answer, cancels.

    POST /predictions/MODEL    Prefer: respond-async             202, Location: /jobs/ID
                               Prefer: respond-async, wait=N     the answer, where it is there within N seconds; else 202
    GET /jobs/ID               202 with its place and Retry-After; then the answer as it would have come; 410 once it is gone
    DELETE /jobs/ID            cancels it

All answers about a job have `x-tsx-job-state`, as a model's own answer may have any status.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import NamedTuple

from tsx_runtime.api import errors
from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access.client_limits import calling
from tsx_runtime.api.headers import (
    JSON,
    NO_CACHE,
    Pair,
    answer_headers,
    shown_headers,
    stored_headers,
)
from tsx_runtime.api.messages import (
    ClientGone,
    Receive,
    Scope,
    Send,
    as_sent,
    request_id_of,
    rest_of,
    send_whole,
    while_client_waits,
)
from tsx_runtime.api.request_options import (
    CALLBACK,
    JOB_SIZE,
    Preference,
    callback_of,
    parse_preference,
    priority_and_timeout,
)
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import Conflict, JobGone, JobNotFound, MethodNotAllowed, TsxError
from tsx_runtime.http.asgi_lane.idempotency import KEYED, REQUEST_ID
from tsx_runtime.http.asgi_lane.predictions import read_request
from tsx_runtime.jobs.keyed_runs import KeyedRequest
from tsx_runtime.jobs.service import Jobs
from tsx_runtime.jobs.store import JobRecord, NewJob, StoredAnswer, StoredRequest
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.wire import header_block

PREFIX = "/jobs/"
WAITS = frozenset({"OPTIONS", "HEAD"})  # methods that run no model
MOST_PAUSE = 60  # seconds until a client looks again
STATE = b"x-tsx-job-state"


@dataclass(eq=False)
class JobRoutes:
    """`limit`: bytes of a body."""

    jobs: Jobs
    registry: Registry
    limit: int
    guard: Guard | None
    counts: ResponseCounts
    confined: bool = False  # see `answer_headers`

    def accepts(self, scope: Scope) -> bool:
        """Whether this request for a prediction is one for later."""
        return scope["method"] not in WAITS and parse_preference(scope["headers"]) is not None

    def shows(self, path: str) -> bool:
        """Whether the path is a job's."""
        return path.startswith(PREFIX) and path.count("/") == 2 and len(path) > len(PREFIX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope)
        rest = None
        try:
            if self.guard is not None:
                self.guard.check(scope["headers"])
            if self.shows(scope["path"]):
                response = await self._job(scope["method"], scope["path"].removeprefix(PREFIX))
            else:
                response = await self._accept(scope, receive, request_id)
        except ClientGone:
            return
        except TsxError as error:
            response, rest = _Response(*errors.fault(error, scope["path"])), rest_of(error, receive)
        except Exception as error:  # the boundary of a request
            response = _Response(*errors.fault(errors.unexpected(error, request_id), scope["path"]))
        self.counts.add(response.status)
        await send_whole(
            send,
            scope,
            response.status,
            response.headers,
            response.request_id or request_id,
            response.body,
            rest,
        )

    async def _accept(self, scope: Scope, receive: Receive, request_id: bytes) -> _Response:
        preference = parse_preference(scope["headers"]) or Preference()
        priority, timeout_ms = priority_and_timeout(scope["headers"])
        if callback := callback_of(scope["headers"]):
            callback = self.jobs.callbacks.check(callback)
        target, route, body = await read_request(
            self.registry, scope, receive, self.limit, JOB_SIZE
        )
        left_out = {CALLBACK, *self.registry.hidden_headers.of(route.name)}
        kept = header_block(shown_headers(as_sent(scope), left_out))
        request = StoredRequest(
            request_id.decode(), scope["method"], scope["path"], scope["query_string"], kept, body
        )
        deadline = None if timeout_ms is None else time.time() + timeout_ms / 1000
        id = secrets.token_hex(16)
        version = target.version if target.version and self._has(route.name, target.version) else ""
        new = NewJob(id, route.name, version, request, priority, deadline, _client(scope), callback)
        keyed: KeyedRequest | None = scope.pop(KEYED, None)
        wait = (
            0 if keyed is not None else preference.wait
        )  # each repeated request gets the same answer
        applied = b"respond-async, wait=%d" % wait if wait else b"respond-async"
        location = (b"location", f"{PREFIX}{id}".encode())
        body = _json(
            {"id": id, "state": "queued", "model": new.model, "version": new.version or None}
        )
        headers = (
            JSON,
            (STATE, b"queued"),
            location,
            (b"preference-applied", applied),
            (b"retry-after", b"1"),
            *NO_CACHE,
        )
        if keyed is not None:  # a job and the answer under its key are stored together
            pairs = ((REQUEST_ID, request_id), *headers)
            await self.jobs.add(
                new, (keyed.key, self.jobs.keyed_runs.answer(keyed, 202, pairs, body))
            )
        else:
            await self.jobs.add(new)
        if (
            wait
            and (answer := await while_client_waits(self.jobs.wait(id, wait), receive)) is not None
        ):
            return self._whole(
                answer, request_id, location, (b"preference-applied", b"wait=%d" % wait)
            )
        return _Response(202, headers, body)

    def _has(self, name: str, version: str) -> bool:
        """Routes of KServe take a version that does not exist for none."""
        try:
            self.registry.find(name, version)
        except TsxError:
            return False
        return True

    async def _job(self, method: str, id: str) -> _Response:
        if method not in ("GET", "HEAD", "DELETE"):
            raise MethodNotAllowed(allowed=("DELETE", "GET", "HEAD"))
        job = await (self.jobs.cancel(id) if method == "DELETE" else self.jobs.get(id))
        if job is None:
            raise JobNotFound(
                f"There is no job {id}. A job is forgotten a day after its answer has expired"
                " (job_retention)."
            )
        if job.state == "expired":
            return _failure(
                JobGone(
                    f"Job {id} has expired (job_retention). Send the request again for an answer."
                ),
                job,
            )
        if method == "DELETE":
            if job.state == "done":
                text = (
                    f"Job {id} is done, so it cannot be cancelled. Its answer is deleted when it"
                    " expires (job_retention)."
                )
                return _failure(Conflict(text), job)
            return _Response(
                200,
                (JSON, (STATE, job.state.encode()), *NO_CACHE),
                _json({"id": job.id, "state": job.state}),
            )
        if job.state in ("queued", "running"):
            return await self._progress(job)
        answer = await self.jobs.answer(id) if job.state == "done" else None
        if answer is None:
            why = (
                "was cancelled"
                if job.state == "cancelled"
                else "is done, and its answer has expired (job_retention)"
            )
            return _failure(JobGone(f"Job {id} {why}. Send the request again for an answer."), job)
        return self._whole(answer, job.request_id.encode())

    def _whole(self, answer: StoredAnswer, request_id: bytes, *headers: Pair) -> _Response:
        """Return the answer as a client that waited gets it, with the headers of a job."""
        status = answer.sound_status
        pairs = answer_headers(status, stored_headers(answer.headers), confined=self.confined)
        return _Response(status, (*pairs, *headers, (STATE, b"done")), answer.body, request_id)

    async def _progress(self, job: JobRecord) -> _Response:
        ahead, expected = await self.jobs.progress(job)
        shown: dict[str, object] = {
            "id": job.id,
            "state": job.state,
            "model": job.model,
            "version": job.version or None,
            "created": job.created,
            "ahead": ahead,
            "expected_seconds": expected,
        }
        pause = b"%d" % min(expected or 1, MOST_PAUSE)
        return _Response(
            202,
            (JSON, (STATE, job.state.encode()), (b"retry-after", pause), *NO_CACHE),
            _json(shown),
        )


class _Response(NamedTuple):
    status: int
    headers: tuple[Pair, ...]
    body: bytes
    request_id: bytes = b""


def _failure(error: TsxError, job: JobRecord) -> _Response:
    status, headers, body = errors.fault(error)
    return _Response(status, (*headers, (STATE, job.state.encode())), body)


def _json(data: dict[str, object]) -> bytes:
    return json.dumps(data, indent=2).encode() + b"\n"


def _client(scope: Scope) -> str:
    """The client that limits are counted for: behind a trusted proxy, that proxy's client."""
    caller = calling.get()
    if caller is not None:
        return str(caller.client)
    client = scope.get("client")
    return str(client[0]) if client else ""
