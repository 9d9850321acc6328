"""The management routes of recordings: start, show and stop a recording."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from tsx_archiver.monitor.recording import RecordingConfig
from tsx_runtime.api.management.schemas import parameters_of
from tsx_runtime.core.persistence import StateStore
from tsx_runtime.features.recording.manager import RecordingManager
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.management import ModelName
from tsx_runtime.http.routes.responses import json_answer, read_object

CONFIG_EXAMPLE = '{"share": 1, "max_size": "100MB", "max_age": "1d"}'
EXAMPLE = {"share": 1, "max_size": "100MB", "max_age": "1d", "answers": False}


class ModelRecording(BaseModel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "digits", "recording": False, "files": 0, "bytes": 0}]
        }
    )

    model: str
    recording: bool
    terms: RecordingConfig | None = None
    directory: str | None = Field(
        None, description="directory of its files on the server; null if nothing can be stored"
    )
    files: int
    bytes: int
    oldest: float | None = Field(None, description="seconds since 1970")
    recorded: int = Field(
        0, description="number of requests since the recording or the server was started"
    )
    dropped: dict[str, int] = Field(
        {}, description="requests that were not recorded, by reason: slow, size, disk"
    )
    problem: str | None = Field(None, description="why nothing can be written or uploaded")


async def describe(recorders: RecordingManager, state: StateStore, model: str) -> ModelRecording:
    """Describe the recording of a model, after the current state has been written to disk.

    Raises:
        ModelNotFound: The model is unknown.
    """
    recorders.find(model)  # This refuses an unknown model without waiting for the disk.
    await state.written()
    recorder = recorders.find(model)
    usage = await (recorders.stored_size(model) if recorder is None else recorder.stored_size())
    directory = recorders.directory(model)
    return ModelRecording(
        model=model,
        recording=recorder is not None,
        terms=recorder.config if recorder else None,
        directory=None if directory is None else str(directory.absolute()),
        files=usage.files,
        bytes=usage.size,
        oldest=usage.oldest,
        recorded=recorder.recorded if recorder else 0,
        dropped=dict(recorder.dropped) if recorder else {},
        problem=(recorder.problem or recorder.upload_problem) if recorder else None,
    )


def build_router(recorders: RecordingManager, state: StateStore, limit: int) -> APIRouter:
    router = APIRouter(tags=["traffic"])
    path = "/models/{model}/record"
    route_options: dict[str, Any] = {"response_model": ModelRecording}
    errors, body = openapi.failures(400, 404, 409, 413), openapi.body_of(RecordingConfig, EXAMPLE)

    @router.put(
        path, summary="Record its requests", responses=errors, openapi_extra=body, **route_options
    )
    async def start(model: ModelName, request: Request) -> Response:
        terms = parameters_of(RecordingConfig, await read_object(request, limit, CONFIG_EXAMPLE))
        await recorders.start(model, terms)
        return await show(model)

    @router.get(
        path, summary="Describe the recording", responses=openapi.failures(404), **route_options
    )
    async def show(model: ModelName) -> Response:
        return json_answer(await describe(recorders, state, model))

    @router.delete(path, summary="Stop recording", responses=openapi.failures(404), **route_options)
    async def stop(
        model: ModelName,
        remove: Annotated[
            bool, Query(description="remove the recorded files as well; by default they are kept")
        ] = False,
    ) -> Response:
        await recorders.stop(model, remove=remove)
        return await show(model)

    return router
