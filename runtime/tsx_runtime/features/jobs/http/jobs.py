"""The routes of asynchronous requests: accept a job, show its progress or response, cancel it.

    POST /predictions/MODEL
        Prefer: respond-async            202, Location: /jobs/ID
        Prefer: respond-async, wait=N    the response if it is ready in N seconds, else 202
    GET /jobs/ID                         202 with progress and Retry-After; then the response of
                                         the model; 410 once it has expired
    DELETE /jobs/ID                      cancels the job

All responses about a job have `x-tsx-job-state`, because a model's response may have any status.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from tsx_runtime.api import errors
from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access.client_limits import current_caller
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
    cased_headers,
    request_id_of,
    send_whole,
    unread_body_of,
    while_client_waits,
)
from tsx_runtime.api.request_options import priority_and_timeout
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import Conflict, JobGone, JobNotFound, MethodNotAllowed, TsxError
from tsx_runtime.features.jobs.http.idempotency import KEYED_SCOPE_KEY, REQUEST_ID
from tsx_runtime.features.jobs.http.preference import (
    CALLBACK,
    JOB_SIZE,
    Preference,
    callback_of,
    parse_preference,
)
from tsx_runtime.features.jobs.keyed_runs import KeyedRequest
from tsx_runtime.features.jobs.service import Jobs
from tsx_runtime.features.jobs.storage.store import JobRecord, NewJob, StoredAnswer, StoredRequest
from tsx_runtime.http.asgi_lane.predictions import read_request
from tsx_runtime.http.routes import openapi
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.wire import header_block

PREFIX = "/jobs/"
NO_RUN_METHODS = frozenset({"OPTIONS", "HEAD"})  # methods that run no model
MAX_RETRY_AFTER_S = 60
JOB_STATE = b"x-tsx-job-state"


def is_async_request(scope: Scope) -> bool:
    """Tell whether a prediction's client asks for an asynchronous response."""
    return scope["method"] not in NO_RUN_METHODS and parse_preference(scope["headers"]) is not None


def is_job_path(path: str) -> bool:
    """Tell whether the path has the form `/jobs/ID`."""
    return path.startswith(PREFIX) and path.count("/") == 2 and len(path) > len(PREFIX)


@dataclass(eq=False)
class JobRoutes:
    """The job routes of one listener, as an ASGI app."""

    jobs: Jobs
    registry: Registry
    limit: int  # largest body in bytes
    guard: Guard | None
    counts: ResponseCounts
    is_confined: bool = False  # See `answer_headers`.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope)
        unread_body = None
        try:
            if self.guard is not None:
                self.guard.check(scope["headers"])
            if is_job_path(scope["path"]):
                response = await self._show_job(scope["method"], scope["path"].removeprefix(PREFIX))
            else:
                response = await self._accept(scope, receive, request_id)
        except ClientGone:
            return
        except Exception as error:  # the boundary of a request
            refusal = errors.to_tsx_error(error, request_id)
            response = _Response(*errors.error_response(refusal, scope["path"]))
            unread_body = unread_body_of(refusal, receive)
        self.counts.add(response.status)
        await send_whole(
            send,
            scope,
            response.status,
            response.headers,
            response.request_id or request_id,
            response.body,
            unread_body,
        )

    async def _accept(self, scope: Scope, receive: Receive, request_id: bytes) -> _Response:
        preference = parse_preference(scope["headers"]) or Preference()
        priority, timeout_ms = priority_and_timeout(scope["headers"])
        if callback := callback_of(scope["headers"]):
            callback = self.jobs.callbacks.check(callback)
        target, route, body = await read_request(
            self.registry, scope, receive, self.limit, JOB_SIZE
        )
        hidden_names = {CALLBACK, *self.registry.hidden_headers.for_model(route.name)}
        block = header_block(shown_headers(cased_headers(scope), hidden_names))
        request = StoredRequest(
            request_id.decode(), scope["method"], scope["path"], scope["query_string"], block, body
        )
        deadline = None if timeout_ms is None else time.time() + timeout_ms / 1000
        job_id = secrets.token_hex(16)
        version = (
            target.version
            if target.version and self._has_version(route.name, target.version)
            else ""
        )
        job = NewJob(
            job_id, route.name, version, request, priority, deadline, _client(scope), callback
        )
        keyed_request: KeyedRequest | None = scope.pop(KEYED_SCOPE_KEY, None)
        # All requests with this key get the same response, so none of them waits.
        wait = 0 if keyed_request is not None else preference.wait
        preference_applied = b"respond-async, wait=%d" % wait if wait else b"respond-async"
        location = (b"location", f"{PREFIX}{job_id}".encode())
        body = _to_json(
            {"id": job_id, "state": "queued", "model": job.model, "version": job.version or None}
        )
        headers = (
            JSON,
            (JOB_STATE, b"queued"),
            location,
            (b"preference-applied", preference_applied),
            (b"retry-after", b"1"),
            *NO_CACHE,
        )
        if keyed_request is not None:  # The job and the response for its key are stored together.
            pairs = ((REQUEST_ID, request_id), *headers)
            await self.jobs.add(
                job,
                (keyed_request.key, self.jobs.keyed_runs.answer(keyed_request, 202, pairs, body)),
            )
        else:
            await self.jobs.add(job)
        if (
            wait
            and (answer := await while_client_waits(self.jobs.wait(job_id, wait), receive))
            is not None
        ):
            return self._model_response(
                answer, request_id, location, (b"preference-applied", b"wait=%d" % wait)
            )
        return _Response(202, headers, body)

    def _has_version(self, name: str, version: str) -> bool:
        """Tell whether the version exists; KServe's routes ignore unknown versions."""
        try:
            self.registry.find(name, version)
        except TsxError:
            return False
        return True

    async def _show_job(self, method: str, job_id: str) -> _Response:
        if method not in ("GET", "HEAD", "DELETE"):
            raise MethodNotAllowed(allowed=("DELETE", "GET", "HEAD"))
        job = await (self.jobs.cancel(job_id) if method == "DELETE" else self.jobs.get(job_id))
        if job is None:
            raise JobNotFound(
                f"There is no job {job_id}. A job is forgotten a day after its answer has expired"
                " (job_retention)."
            )
        if job.state == "expired":
            return _failure(
                JobGone(
                    f"Job {job_id} has expired (job_retention). Send the request again for an"
                    " answer."
                ),
                job,
            )
        if method == "DELETE":
            if job.state == "done":
                text = (
                    f"Job {job_id} is done, so it cannot be cancelled. Its answer is deleted when"
                    " it expires (job_retention)."
                )
                return _failure(Conflict(text), job)
            return _Response(
                200,
                (JSON, (JOB_STATE, job.state.encode()), *NO_CACHE),
                _to_json({"id": job.id, "state": job.state}),
            )
        if job.state in ("queued", "running"):
            return await self._progress(job)
        answer = await self.jobs.answer(job_id) if job.state == "done" else None
        if answer is None:
            reason = (
                "was cancelled"
                if job.state == "cancelled"
                else "is done, and its answer has expired (job_retention)"
            )
            return _failure(
                JobGone(f"Job {job_id} {reason}. Send the request again for an answer."), job
            )
        return self._model_response(answer, job.request_id.encode())

    def _model_response(self, answer: StoredAnswer, request_id: bytes, *headers: Pair) -> _Response:
        """Return the response of a model, with the job's headers added."""
        status = answer.sound_status
        pairs = answer_headers(status, stored_headers(answer.headers), is_confined=self.is_confined)
        return _Response(status, (*pairs, *headers, (JOB_STATE, b"done")), answer.body, request_id)

    async def _progress(self, job: JobRecord) -> _Response:
        jobs_ahead, expected_s = await self.jobs.progress(job)
        status_fields: dict[str, object] = {
            "id": job.id,
            "state": job.state,
            "model": job.model,
            "version": job.version or None,
            "created": job.created,
            "ahead": jobs_ahead,
            "expected_seconds": expected_s,
        }
        retry_after = b"%d" % min(expected_s or 1, MAX_RETRY_AFTER_S)
        return _Response(
            202,
            (JSON, (JOB_STATE, job.state.encode()), (b"retry-after", retry_after), *NO_CACHE),
            _to_json(status_fields),
        )


class _Response(NamedTuple):
    status: int
    headers: tuple[Pair, ...]
    body: bytes
    request_id: bytes = b""


def _failure(error: TsxError, job: JobRecord) -> _Response:
    status, headers, body = errors.error_response(error)
    return _Response(status, (*headers, (JOB_STATE, job.state.encode())), body)


def _to_json(data: dict[str, object]) -> bytes:
    return json.dumps(data, indent=2).encode() + b"\n"


def _client(scope: Scope) -> str:
    """Return the client to which limits apply; behind a trusted proxy, the proxy's client."""
    caller = current_caller.get()
    if caller is not None:
        return str(caller.client)
    client = scope.get("client")
    return str(client[0]) if client else ""


def job_path() -> dict[str, Any]:
    """Return the path of a job, which a 202 response has as its Location."""
    id = openapi.parameter("id", "from the Location of the 202", "0f8b5c1e6a7d4b7e9c3f2a1d5b6c7d8e")
    operations = {
        "get": (
            "Fetch an answer",
            {
                "202": "it is queued or running: its place and the expected time",
                "200": "the answer, of any status",
            },
        ),
        "delete": ("Cancel a request", {"200": "it is cancelled", "409": "it is answered"}),
    }
    failure_texts = {
        "404": "no such job",
        "410": "it was cancelled, or its answer has expired",
        "503": "the store cannot be used",
    }
    return {
        "/jobs/{id}": {
            method: {
                "tags": ["jobs"],
                "summary": summary,
                "operationId": f"{method}_job",
                "parameters": [id],
                "responses": (
                    {status: {"description": text} for status, text in successes.items()}
                    | {
                        status: {"description": text, "content": openapi.ERROR}
                        for status, text in failure_texts.items()
                    }
                ),
            }
            for method, (summary, successes) in operations.items()
        }
    }
