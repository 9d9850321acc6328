"""The management routes of vLLM's API that load and unload LoRA adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tsx_runtime.api.management.service import ManagementService
from tsx_runtime.errors import BadRequest
from tsx_runtime.feature import ServerApp
from tsx_runtime.features.huggingface.adapters import Adapters
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.responses import read_object

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
EXAMPLE = {"lora_name": "sql", "lora_path": "sql-lora"}


class NamedAdapter(BaseModel):
    model_config = ConfigDict(strict=True)

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
    router = APIRouter(tags=["management"])
    limit, service = app.context.max_management_body, ManagementService(app.context.registry)

    async def finish(change: Coroutine[Any, Any, None], text: str) -> Response:
        # A client that leaves must not leave workers behind that differ.
        await asyncio.shield(asyncio.ensure_future(change))
        return Response(f"Success: LoRA adapter {text} successfully.", media_type="text/plain")

    async def read(kind: type[NamedAdapter], request: Request) -> Any:
        service.check_model_api()
        body = await read_object(request, limit, str(EXAMPLE).replace("'", '"'))
        try:
            return kind.model_validate(body)
        except ValidationError as error:
            names = " and ".join(f"'{name}'" for name in kind.model_fields if name in EXAMPLE)
            (problem, *_) = error.errors(include_url=False)
            raise BadRequest(
                f"{names} must be provided. The field {problem['loc'][0]}: {problem['msg']}."
            ) from None

    @router.post(
        LOAD,
        summary="Add a LoRA adapter to a model, while it is served",
        responses=openapi.failures(400, 404, 405, 413),
        openapi_extra=openapi.body_of(AdapterSource, EXAMPLE),
    )
    async def load(request: Request) -> Response:
        body = await read(AdapterSource, request)
        version = adapters.find(body.model)
        return await finish(
            adapters.add(version, body.lora_name, body.lora_path, in_place=body.load_inplace),
            f"'{body.lora_name}' added",
        )

    @router.post(
        UNLOAD,
        summary="Remove a LoRA adapter that was added",
        responses=openapi.failures(400, 404, 405, 413),
        openapi_extra=openapi.body_of(NamedAdapter, {"lora_name": "sql"}),
    )
    async def unload(request: Request) -> Response:
        body = await read(NamedAdapter, request)
        version = adapters.find(body.model)
        return await finish(adapters.remove(version, body.lora_name), f"'{body.lora_name}' removed")

    guard = app.context.guards.management
    app.add_routes(router, {LOAD[1:]: guard, UNLOAD[1:]: guard})
