"""The management routes of asynchronous requests: list jobs, show a record, retry a job."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, Field

from tsx_runtime.api.access.auth import Guard
from tsx_runtime.errors import Conflict, JobNotFound
from tsx_runtime.features.jobs.service import Jobs
from tsx_runtime.features.jobs.storage.store import JobRecord, JobState
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.responses import json_answer
from tsx_runtime.shared.redaction import redacted

MAX_PAGE_JOBS = 500
MAX_JOB_NUMBER = (1 << 63) - 1  # the largest number of a job in a store
JobId = Annotated[
    str, Path(alias="id", description="id of the job: the last part of the Location of its 202")
]


class JobDescription(BaseModel):
    """The record of a job.

    Times are in seconds since 1970. `status` is the status of the answer. `size` is the size of the
    request's body in bytes.
    """

    id: str
    state: JobState
    model: str
    version: str = Field(description="the requested one; empty where the request named none")
    status: int | None
    created: float
    started: float | None
    finished: float | None
    expires: float | None
    attempts: int
    priority: int
    size: int
    client: str
    request_id: str
    callback: str


class JobPage(BaseModel):
    jobs: list[JobDescription] = Field(description="the newest first")
    next: str | None = Field(
        None, description="the parameter `next` for the jobs before these, if there are any"
    )
    counts: dict[str, int] = Field(description="all jobs of the model, or of all, by state")
    oldest: float | None = Field(
        None, description="seconds for which the oldest of those that are queued has waited"
    )


def build_router(jobs: Jobs, guard: Guard | None) -> APIRouter:
    """Build the management routes of jobs, which check the management guard.

    They check it themselves, because the guard of `/jobs` also admits clients of predictions.
    """

    def check(request: Request) -> None:
        if guard is not None:
            guard.check(request.scope["headers"])

    router = APIRouter(tags=["jobs"], dependencies=[Depends(check)])

    @router.get(
        "/jobs",
        summary="List asynchronous requests",
        response_model=JobPage,
        responses=openapi.failures(400, 503),
    )
    async def list_jobs(
        model: Annotated[str | None, Query(description="only jobs of this model")] = None,
        state: Annotated[
            JobState | Literal["failed"] | None,
            Query(
                description="only jobs in this state; failed: done with a status of 400 or above"
            ),
        ] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE_JOBS, description="how many at most")] = 100,
        before_number: Annotated[
            int | None,
            Query(alias="next", ge=1, le=MAX_JOB_NUMBER, description="`next` of the answer before"),
        ] = None,
    ) -> Response:
        if not await jobs.is_open():
            return json_answer(JobPage(jobs=[], next=None, counts={}, oldest=None))
        stored_state: JobState | None = "done" if state == "failed" else state
        min_status = 400 if state == "failed" else None
        records = await jobs.store.list_jobs(
            state=stored_state,
            model=model,
            min_status=min_status,
            before_number=before_number,
            limit=limit + 1,
        )
        queue, oldest = await jobs.queue()
        counts: Counter[str] = Counter()
        for (name, job_state), count in queue.items():
            if model in (None, name):
                counts[job_state] += count
        waiting_s = [seconds for name, seconds in oldest.items() if model in (None, name)]
        next_page = str(records[limit - 1].number) if len(records) > limit else None
        page = JobPage(
            jobs=[_describe(job) for job in records[:limit]],
            next=next_page,
            counts=counts,
            oldest=max(waiting_s, default=None),
        )
        return json_answer(page)

    @router.get(
        "/jobs/{id}/record",
        summary="Describe one",
        response_model=JobDescription,
        responses=openapi.failures(404, 503),
    )
    async def record(job: JobId) -> Response:
        return json_answer(_describe(_require_job(job, await jobs.get(job))))

    @router.post(
        "/jobs/{id}/retry",
        summary="Run it again",
        response_model=JobDescription,
        responses=openapi.failures(404, 409, 503),
    )
    async def retry(job: JobId) -> Response:
        before = _require_job(job, await jobs.get(job))
        after = _require_job(job, await jobs.retry(job))
        if after.state != "queued" or before.state not in ("done", "cancelled"):
            raise Conflict(
                f"Job {job} is {before.state}: only one that is done or cancelled can run again."
            )
        return json_answer(_describe(after))

    return router


def build_closed_router() -> APIRouter:
    """Build the routes of a server without a job store; their error explains why."""
    router = APIRouter()

    @router.api_route("/jobs", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    @router.api_route(
        "/jobs/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False
    )
    async def refuse() -> None:
        raise JobNotFound(
            "This server stores no jobs: jobs_store is off. Start it with a jobs_store to use them."
        )

    return router


def _require_job(id: str, job: JobRecord | None) -> JobRecord:
    if job is None:
        raise JobNotFound(
            f"Job {id} is not known: the id is mistyped, or its record was removed a day after its"
            " answer (job_retention)."
        )
    return job


def _describe(record: JobRecord) -> JobDescription:
    return JobDescription.model_validate(record._asdict() | {"callback": redacted(record.callback)})
