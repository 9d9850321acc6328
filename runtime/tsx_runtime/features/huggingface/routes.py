"""The management routes of vLLM's API that load and unload LoRA adapters."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from tsx_runtime.api.management.schemas import ParametersT, parameters_of
from tsx_runtime.api.management.service import ManagementService
from tsx_runtime.feature import ServerApp
from tsx_runtime.features.huggingface.adapters import Adapters
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.responses import read_object

LOAD, UNLOAD = "v1/load_lora_adapter", "v1/unload_lora_adapter"
EXAMPLE = '{"lora_name": "sql", "lora_path": "sql-lora"}'


class NamedAdapter(BaseModel):
    lora_name: str = Field(min_length=1, max_length=256)
    model: str | None = Field(
        None, description="NAME[:VERSION] of the base model; needed if several generate text"
    )


class AdapterSource(NamedAdapter):
    lora_path: str = Field(
        min_length=1,
        description=(
            "a directory of the model store, hf:ORG/NAME[@REVISION], or the URL of a directory that"
            " allowed_urls allows"
        ),
    )
    load_inplace: bool = Field(False, description="replace the adapter that has this name")


def add_routes(app: ServerApp, adapters: Adapters) -> None:
    router = APIRouter(tags=["management"], responses=openapi.failures(400, 404, 405, 413))
    registry, limit = app.context.registry, app.context.max_management_body

    async def read(kind: type[ParametersT], request: Request) -> ParametersT:
        ManagementService(registry).check_model_api()
        return parameters_of(kind, await read_object(request, limit, EXAMPLE))

    async def finish(change: Coroutine[Any, Any, None], text: str) -> Response:
        # A client that leaves must not leave workers behind that differ.
        await registry.resources.background.run_shielded(change)
        return Response(f"Success: LoRA adapter {text} successfully.", media_type="text/plain")

    @router.post(
        f"/{LOAD}",
        summary="Add a LoRA adapter to a model, while it is served",
        openapi_extra=openapi.body_of(AdapterSource, json.loads(EXAMPLE)),
    )
    async def load(request: Request) -> Response:
        body = await read(AdapterSource, request)
        version = adapters.find(body.model)
        change = adapters.add(version, body.lora_name, body.lora_path, in_place=body.load_inplace)
        return await finish(change, f"'{body.lora_name}' added")

    @router.post(
        f"/{UNLOAD}",
        summary="Remove a LoRA adapter that was added",
        openapi_extra=openapi.body_of(NamedAdapter, {"lora_name": "sql"}),
    )
    async def unload(request: Request) -> Response:
        body = await read(NamedAdapter, request)
        change = adapters.remove(adapters.find(body.model), body.lora_name)
        return await finish(change, f"'{body.lora_name}' removed")

    app.add_routes(router, dict.fromkeys((LOAD, UNLOAD), app.context.guards.management))
