"""The routes of KServe's protocol `/v2` for health, readiness, metadata and sample inputs.

Predictions are in `asgi_lane/predictions.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from urllib.parse import quote

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from tsx_runtime.api.management.describe import unready_versions
from tsx_runtime.api.management.samples import example_of, input_of, sample_of, tensors_of
from tsx_runtime.api.management.schemas import ServerMetadata
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.workers.signature import ModelSignature
from tsx_runtime.errors import SampleNotFound
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.management import ModelName, VersionName
from tsx_runtime.http.routes.responses import json_answer


class Live(BaseModel):
    live: bool = True


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class Tensor(BaseModel):
    """The description of a tensor; -1 stands for a dimension of any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelParameters(BaseModel):
    input: str | None = Field(
        default=None, description="image, text, json or file: what a body of its predictions is"
    )


class ModelMetadata(BaseModel):
    """The metadata of a model; `outputs` is empty, because handlers describe only inputs."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "digits", "versions": ["1.0"], "platform": ""}]}
    )

    name: str
    versions: list[str]
    platform: str = ""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    parameters: ModelParameters = ModelParameters()
    signature: ModelSignature | None = Field(
        default=None,
        description="the types of its requests and responses, if its handler has types",
    )


def build_router(registry: Registry, roles: Collection[str]) -> APIRouter:
    """Build the routes of a listener."""
    router = APIRouter(tags=["kserve"])
    if "inference" in roles:
        _add_server(router, registry)
        _add_v2_models(router, registry)
        _add_samples(router, registry)
    return router


def _add_server(router: APIRouter, registry: Registry) -> None:
    @router.get("/v2", summary="Name and version of the server", response_model=ServerMetadata)
    async def server() -> Response:
        return json_answer(ServerMetadata())

    @router.get("/v2/health/live", summary="Is the server alive", response_model=Live)
    async def live() -> Response:
        return json_answer(Live())

    @router.get(
        "/v2/health/ready",
        summary="Is the default version of every model ready",
        response_model=Ready,
        responses={503: {"model": Ready}},
    )
    async def ready() -> Response:
        is_ready = not registry.stopping and not unready_versions(registry)
        return json_answer(Ready(ready=is_ready), 200 if is_ready else 503)


def _add_v2_models(router: APIRouter, registry: Registry) -> None:
    @router.get(
        "/v2/models/{model}",
        summary="Metadata of the model",
        response_model=ModelMetadata,
        responses=openapi.failures(404),
    )
    async def metadata(model: ModelName) -> Response:
        return await _metadata(registry, model, None)

    @router.get(
        "/v2/models/{model}/ready",
        summary="Is its default version ready",
        response_model=ModelReady,
        responses=_NOT_READY,
    )
    async def model_ready(model: ModelName) -> Response:
        return _ready(registry.find(model))

    @router.get(
        "/v2/models/{model}/versions/{version}",
        summary="Metadata of the version",
        response_model=ModelMetadata,
        responses=openapi.failures(404),
    )
    async def version_metadata(model: ModelName, version: VersionName) -> Response:
        return await _metadata(registry, model, version)

    @router.get(
        "/v2/models/{model}/versions/{version}/ready",
        summary="Is the version ready",
        response_model=ModelReady,
        responses=_NOT_READY,
    )
    async def version_ready(model: ModelName, version: VersionName) -> Response:
        return _ready(registry.find(model, version))


def _add_samples(router: APIRouter, registry: Registry) -> None:
    content = {
        200: {
            "content": {"application/octet-stream": {}},
            "description": "a body for a prediction, with its content type",
        }
    }
    responses = openapi.failures(404) | content

    @router.get(
        "/v2/models/{model}/sample",
        summary="An input to try the model with",
        responses=responses,
        response_class=Response,
    )
    async def sample(model: ModelName) -> Response:
        return await _sample(registry.find(model))

    @router.get(
        "/v2/models/{model}/versions/{version}/sample",
        summary="An input to try the version with",
        responses=responses,
        response_class=Response,
    )
    async def version_sample(model: ModelName, version: VersionName) -> Response:
        return await _sample(registry.find(model, version))


async def _sample(version: ModelVersion) -> Response:
    sample = await asyncio.to_thread(sample_of, version) or await example_of(version)
    if sample is None:
        text = (
            f"Model {version.name} has no sample, and what its handler takes is not known. Pack"
            " one: `tsx archive --sample FILE`."
        )
        raise SampleNotFound(text)
    # Browsers must not show a sample as a page, because its scripts would run in this origin.
    headers = {
        "content-disposition": "attachment",
        "x-content-type-options": "nosniff",
        "x-tsx-sample": quote(sample.source),
    }
    return Response(sample.body, media_type=sample.content_type, headers=headers)


async def _metadata(registry: Registry, model: str, version: str | None) -> Response:
    model_version = registry.find(model, version)
    versions = [model_version.version] if version else list(registry.models[model].versions)
    inputs = [
        Tensor(name=name or "input", datatype=kind, shape=[-1, *shape])
        for name, kind, shape in await tensors_of(model_version)
    ]
    return json_answer(
        ModelMetadata(
            name=model,
            versions=versions,
            inputs=inputs,
            parameters=ModelParameters(input=input_of(model_version)),
            signature=model_version.signature,
        )
    )


def _ready(version: ModelVersion) -> Response:
    return json_answer(
        ModelReady(name=version.name, ready=version.ready), 200 if version.ready else 503
    )


_NOT_READY = openapi.failures(404) | {
    503: {"model": ModelReady, "description": "no worker is ready"}
}
