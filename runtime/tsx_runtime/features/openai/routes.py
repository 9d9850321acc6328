"""The routes `/v1/models` and `/v1/models/MODEL`, for the clients of OpenAI and of KServe.

Each response has the fields that either client reads.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel

from tsx_archiver.metadata.huggingface import packed_adapters
from tsx_runtime.api.openai import split_name
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import ModelNotFound
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.kserve import ModelReady
from tsx_runtime.http.routes.responses import json_answer

OpenAIName = Annotated[
    str,
    Path(description="a registered model: NAME[:VERSION-or-LABEL][/ADAPTER]", examples=["digits"]),
]


class OpenAIModel(BaseModel):
    """A model as OpenAI's API describes it.

    `created` is the start of this server in seconds since 1970.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tsx"


class NamedModel(ModelReady, OpenAIModel):
    """A model's description for the clients of both KServe and OpenAI."""


class ModelNames(BaseModel):
    """The names of all models.

    `models` is for KServe's clients. `object` and `data` are for OpenAI's clients; `data` also has
    each adapter as a model.
    """

    models: list[str]
    object: Literal["list"] = "list"
    data: list[OpenAIModel]


def build_router(registry: Registry) -> APIRouter:
    """Build the routes of a listener.

    TorchServe's clients use `/v1/models/{model}` on the management address, and KServe's clients on
    the inference address.
    """
    router = APIRouter(tags=["kserve"])
    start_time = int(time.time())

    @router.get("/v1/models", summary="The names of all models", response_model=ModelNames)
    async def names() -> Response:
        adapters = {name: adapters_of(registry.find(name)) for name in registry.models}
        ids = [
            id
            for name in registry.names
            for id in (name, *(f"{name}/{adapter}" for adapter in adapters.get(name, ())))
        ]
        return json_answer(
            ModelNames(
                models=registry.names, data=[OpenAIModel(id=id, created=start_time) for id in ids]
            )
        )

    @router.get(
        "/v1/models/{model:path}",
        summary="Is the model ready",
        response_model=NamedModel,
        responses=openapi.failures(404),
    )
    async def model_ready(model: OpenAIName) -> Response:
        name, number, adapter = split_name(model)
        version = registry.find(name, number)
        if adapter and adapter not in adapters_of(version):
            raise ModelNotFound(
                f"Model {name} has no adapter {adapter}. It has"
                f" {', '.join(adapters_of(version)) or 'none'}."
            )
        # The status is always 200, as in TorchServe.
        return json_answer(NamedModel(id=model, created=start_time, name=name, ready=version.ready))

    return router


def adapters_of(version: ModelVersion) -> list[str]:
    return [*packed_adapters(version.manifest), *version.added_adapters]
