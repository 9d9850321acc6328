"""The management routes for the times of requests: one request by its id, or the slowest ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import ConfigDict, Field

from tsx_runtime.api.management.camel import Camel
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.telemetry.recent_requests import MAX_NEWEST, MAX_SLOWEST, RequestRecord
from tsx_runtime.errors import RequestNotFound
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.responses import json_answer

_EXAMPLE: dict[str, Any] = {
    "requestId": "f7e9c1d2-3b4a-4c5d-8e6f-00000000002a",
    "modelName": "digits",
    "modelVersion": "1.0",
    "status": 200,
    "arrived": "2026-05-30T21:46:03.626Z",
    "batchSize": 4,
    "milliseconds": {
        "queue": 0.0,
        "batch": 0.21,
        "preprocess": 3.1,
        "inference": 5.6,
        "postprocess": 0.2,
        "other": 0.4,
        "total": 9.51,
    },
}


class RequestTimes(Camel):
    """The times of an answered request.

    `milliseconds` has consecutive steps, and their sum as `total`.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    request_id: str = Field(description="the answer's x-request-id")
    model_name: str
    model_version: str
    status: int
    error: str | None = Field(None, description="why no worker answered it")
    arrived: str
    batch_size: int | None = Field(
        None, description="number of requests in its batch, including itself"
    )
    milliseconds: dict[str, float] = Field(
        description=(
            "queue, batch, preprocess, inference, postprocess (as far as known), other, total"
        )
    )


class SlowRequests(Camel):
    requests: list[RequestTimes] = Field(description="the slowest first")


def build_router(registry: Registry) -> APIRouter:
    router = APIRouter(tags=["debug"], prefix="/debug")

    @router.get(
        # Any text is accepted as an id, because no other route has this prefix.
        "/requests/{request_id:path}",
        summary="Where the time of one request went",
        response_model=RequestTimes,
        responses=openapi.failures(404),
    )
    async def request(
        request_id: Annotated[str, Path(description="the answer's x-request-id")],
    ) -> Response:
        id_bytes = request_id.encode("utf-8", "replace")
        for version in _versions(registry):
            record = version.stats.recent.find(id_bytes)
            if record is not None:
                return json_answer(_times(version, record))
        raise RequestNotFound(
            f"Request {request_id} is not known: it is not answered yet, or it is neither among the"
            f" newest {MAX_NEWEST} of its model nor among the slowest {MAX_SLOWEST}. The id is in the"
            " answer's header x-request-id. A request that is sent with x-tsx-timing: 1 is always"
            " remembered."
        )

    @router.get(
        "/slowest",
        summary="The slowest requests of the last 30 to 60 minutes",
        response_model=SlowRequests,
        responses=openapi.failures(400, 404),
    )
    async def slowest(
        model: Annotated[str | None, Query(description="only requests of this model")] = None,
        count: Annotated[
            int, Query(ge=1, le=MAX_SLOWEST, description="how many at most")
        ] = MAX_SLOWEST,
    ) -> Response:
        if model is not None:
            registry.find(model)
        entries = [
            (record.took, version, record)
            for version in _versions(registry)
            if model in (None, version.name)
            for record in version.stats.recent.slowest()
        ]
        entries.sort(key=lambda entry: -entry[0])
        return json_answer(
            SlowRequests(
                requests=[_times(version, record) for _, version, record in entries[:count]]
            )
        )

    return router


def _versions(registry: Registry) -> Iterator[ModelVersion]:
    for model in registry.models.values():
        yield from model.versions.values()


def _times(version: ModelVersion, record: RequestRecord) -> RequestTimes:
    arrived = datetime.fromtimestamp(
        time.time() - (time.monotonic() - record.arrived), timezone.utc
    )
    seconds = (
        {"total": record.took} if record.times is None else record.times.seconds(record.arrived)
    )
    return RequestTimes(
        request_id=record.request_id.decode("utf-8", "replace"),
        model_name=version.name,
        model_version=version.version,
        status=record.status,
        error=record.error or None,
        arrived=arrived.strftime("%Y-%m-%dT%H:%M:%S.") + f"{arrived.microsecond // 1000:03d}Z",
        batch_size=None if record.times is None else record.times.size,
        milliseconds={name: round(1000 * value, 3) for name, value in seconds.items()},
    )
