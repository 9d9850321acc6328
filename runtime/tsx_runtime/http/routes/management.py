"""The management routes of models: register, list, describe, scale, set default, unregister."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from tsx_runtime.api.access.tokens import Keys
from tsx_runtime.api.management.describe import PAGE
from tsx_runtime.api.management.schemas import (
    DescribedModels,
    Flag,
    ModelList,
    RegisterParameters,
    ScaleParameters,
    Status,
    parameters_of,
)
from tsx_runtime.api.management.service import ManagementService
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.responses import json_answer, read_parameters

ModelName = Annotated[str, Path(description="a registered model", examples=["digits"])]
VersionName = Annotated[str, Path(description="one of its versions", examples=["1.0"])]
Customized = Annotated[Flag, Query(description="call the handler's describe_handle as well")]
Force = Annotated[Flag, Query(description="accept versions that are not registered yet")]
Changes = Annotated[ScaleParameters, Query()]
IgnoredParameter = Annotated[
    str | None,
    Query(
        deprecated=True,
        description="accepted for TorchServe's clients; has no effect in TorchServe or tsx",
    ),
]

DESCRIBE_OPTIONS: dict[str, Any] = {
    "response_model": DescribedModels,
    "responses": openapi.failures(404, 503),
}
PENDING_RESPONSE: dict[int | str, dict[str, Any]] = {
    202: {"model": Status, "description": "under way"}
}
SCALE_OPTIONS: dict[str, Any] = {
    "response_model": Status,
    "responses": openapi.failures(400, 404, 500, 507) | PENDING_RESPONSE,
}
UNREGISTER_OPTIONS: dict[str, Any] = {
    "response_model": Status,
    "responses": openapi.failures(403, 404, 405, 408, 409),
}


def build_router(registry: Registry, limit: int) -> APIRouter:
    router = APIRouter(tags=["management"])
    management = ManagementService(registry)
    _add_model_routes(router, management, limit)
    _add_version_routes(router, management)
    return router


def build_token_router(keys: Keys) -> APIRouter:
    """Build the route that replaces a token; the new token is written only to the key file."""
    router = APIRouter(tags=["management"])

    async def renew(
        type: Annotated[
            str, Query(description="management or inference", examples=["inference"])
        ] = "",
    ) -> Response:
        keys.renew(type)
        # TorchServe also returns an empty line.
        return Response("\n", media_type="application/json")

    router.add_api_route(
        "/token",
        renew,
        methods=["GET"],
        summary="Replace a token by a new one",
        responses=openapi.failures(400),
    )
    router.add_api_route(
        "/token", renew, methods=["POST", "PUT", "PATCH", "DELETE"], include_in_schema=False
    )
    return router


def _add_model_routes(router: APIRouter, management: ManagementService, limit: int) -> None:
    @router.get(
        "/models",
        summary="List the models",
        response_model=ModelList,
        responses=openapi.failures(400),
    )
    async def list_(
        limit: Annotated[int, Query(description="models of one page, at most 100")] = PAGE,
        next_page_token: Annotated[int, Query(description="first entry of the page")] = 0,
    ) -> Response:
        return json_answer(management.list(limit, next_page_token))

    @router.post(
        "/models",
        summary="Register a model from the model store, or from a URL",
        response_model=Status,
        responses=openapi.failures(400, 404, 405, 409, 500, 507)
        | {202: {"model": Status, "description": "its workers are being started"}},
        openapi_extra=openapi.query_or_body(RegisterParameters),
    )
    async def register(request: Request) -> Response:
        # This check comes before the body is read, because the body may be large.
        management.check_model_api("GET")
        parameters = parameters_of(RegisterParameters, await read_parameters(request, limit))
        return json_answer(*await management.register(parameters))

    @router.get("/models/{model}", summary="Describe its default version", **DESCRIBE_OPTIONS)
    async def describe(model: ModelName, customized: Customized = False) -> Response:
        return json_answer(await management.describe(model, None, customized))

    @router.put(
        "/models/{model}",
        summary="Scale its default version, or change its limits",
        **SCALE_OPTIONS,
    )
    async def scale(request: Request, model: ModelName, changes: Changes) -> Response:
        return json_answer(
            *await management.change(model, changes.model_version, changes, request.query_params)
        )

    @router.delete(
        "/models/{model}", summary="Unregister its default version", **UNREGISTER_OPTIONS
    )
    async def unregister(
        model: ModelName, synchronous: IgnoredParameter = None, timeout: IgnoredParameter = None
    ) -> Response:
        return json_answer(await management.unregister(model, None))


def _add_version_routes(router: APIRouter, management: ManagementService) -> None:
    @router.get(
        "/models/{model}/{version}",
        summary="Describe one version, or with the version `all` every one",
        **DESCRIBE_OPTIONS,
    )
    async def describe(
        model: ModelName, version: VersionName, customized: Customized = False
    ) -> Response:
        return json_answer(await management.describe(model, version, customized))

    @router.put(
        "/models/{model}/{version}",
        summary="Scale one version, or change its limits",
        **SCALE_OPTIONS,
    )
    async def scale(
        request: Request, model: ModelName, version: VersionName, changes: Changes
    ) -> Response:
        return json_answer(*await management.change(model, version, changes, request.query_params))

    @router.put(
        "/models/{model}/{version}/set-default",
        summary="Set the default version",
        response_model=Status,
        responses=openapi.failures(404),
    )
    async def set_default(model: ModelName, version: VersionName) -> Response:
        return json_answer(await management.set_default(model, version))

    @router.delete(
        "/models/{model}/{version}", summary="Unregister one version", **UNREGISTER_OPTIONS
    )
    async def unregister(
        model: ModelName,
        version: VersionName,
        synchronous: IgnoredParameter = None,
        timeout: IgnoredParameter = None,
    ) -> Response:
        return json_answer(await management.unregister(model, version))

    @router.options("/models/{model}", include_in_schema=False)
    async def options(request: Request, model: ModelName) -> Response:
        management.registry.find(model)
        return Response(
            openapi.to_json(openapi.describe_management(model, request.app.openapi())),
            media_type="application/json",
        )
