"""The management routes of recordings: begin one, look at it, end it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from tsx_runtime.api.parameters import parameters_of
from tsx_runtime.core.recording.config import RecordingConfig
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.management import ModelName
from tsx_runtime.http.routes.responses import json_answer, read_object

TERMS = '{"share": 1, "max_size": "100MB", "max_age": "1d"}'
EXAMPLE = {"share": 1, "max_size": "100MB", "max_age": "1d", "answers": False}


class ModelRecording(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "digits", "recording": False, "files": 0, "bytes": 0}]})

    model: str
    recording: bool
    terms: RecordingConfig | None = None
    directory: str | None = Field(None, description="directory of its files on the server; null if nothing can be stored")
    files: int
    bytes: int
    oldest: float | None = Field(None, description="seconds since 1970")
    recorded: int = Field(0, description="number of requests since the recording or the server was started")
    dropped: dict[str, int] = Field({}, description="requests that were not recorded, by reason: slow, size, disk")
    problem: str | None = Field(None, description="why nothing can be written to disk")


class RecordRoutes:
    """The routes' bodies. Each answers with what holds now, once that is kept on the disk."""

    def __init__(self, registry: Registry, limit: int) -> None:
        self.registry = registry
        self.recorders = registry.recorders
        self.limit = limit

    async def start(self, model: str, request: Request) -> Response:
        terms = parameters_of(RecordingConfig, await read_object(request, self.limit, TERMS))
        await self.recorders.start(model, terms)
        return await self.show(model)

    async def stop(self, model: str, remove: bool) -> Response:
        await self.recorders.stop(model, remove=remove)
        return await self.show(model)

    async def show(self, model: str) -> Response:
        self.recorders.find(model)  # an unknown model is refused without waiting
        await self.registry.state.written()
        recorder = self.recorders.find(model)
        kept = await (self.recorders.kept(model) if recorder is None else recorder.kept())
        directory = self.recorders.directory(model)
        described = ModelRecording(
            model=model,
            recording=recorder is not None,
            terms=recorder.config if recorder else None,
            directory=None if directory is None else str(directory.absolute()),
            files=kept.files,
            bytes=kept.size,
            oldest=kept.oldest,
            recorded=recorder.recorded if recorder else 0,
            dropped=dict(recorder.dropped) if recorder else {},
            problem=recorder.problem if recorder else None,
        )
        return json_answer(described)


def build_router(registry: Registry, limit: int) -> APIRouter:
    router = APIRouter(tags=["traffic"])
    routes = RecordRoutes(registry, limit)

    @router.put(
        "/models/{model}/record",
        summary="Record its requests",
        response_model=ModelRecording,
        responses=openapi.failures(400, 404, 409, 413),
        openapi_extra=openapi.body_of(RecordingConfig, EXAMPLE),
    )
    async def start(model: ModelName, request: Request) -> Response:
        return await routes.start(model, request)

    @router.get("/models/{model}/record", summary="Describe the recording", response_model=ModelRecording, responses=openapi.failures(404))
    async def show(model: ModelName) -> Response:
        return await routes.show(model)

    @router.delete("/models/{model}/record", summary="Stop recording", response_model=ModelRecording, responses=openapi.failures(404))
    async def stop(
        model: ModelName, remove: Annotated[bool, Query(description="remove the recorded files as well; by default they are kept")] = False
    ) -> Response:
        return await routes.stop(model, remove)

    return router
