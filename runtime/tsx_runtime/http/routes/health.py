"""Health routes: liveness (`/livez`), readiness (`/readyz`), and TorchServe's `/ping`.

These routes need no token.
"""

from __future__ import annotations

from collections.abc import Collection

from fastapi import APIRouter, Response

from tsx_runtime.api.management.describe import is_given_up, is_healthy, unready_versions
from tsx_runtime.api.management.schemas import Health, Readiness
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.http.routes.responses import json_answer

# Methods that `/ping` accepts, but that are not in the OpenAPI document.
UNDOCUMENTED_METHODS = ["HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def build_router(registry: Registry, roles: Collection[str]) -> APIRouter:
    """Build `/livez` and `/readyz`, and also `/ping` on the inference address."""
    router = APIRouter(tags=["health"])

    async def livez() -> Response:
        is_dead = registry.settings.restart_when_dead and any(
            is_given_up(model.versions[model.default]) for model in registry.models.values()
        )
        return json_answer(Health(status="Dead" if is_dead else "Alive"), 503 if is_dead else 200)

    async def readyz() -> Response:
        unready = unready_versions(registry)
        is_ready = not unready and not registry.stopping
        status = "Stopping" if registry.stopping else "Ready" if is_ready else "Not ready"
        return json_answer(Readiness(status=status, not_ready=unready), 200 if is_ready else 503)

    async def ping() -> Response:
        is_healthy_server = is_healthy(registry.models.values())
        return json_answer(
            Health(status="Healthy" if is_healthy_server else "Unhealthy"),
            200 if is_healthy_server else 500,
        )

    summary = "Is the server alive"
    router.add_api_route(
        "/livez",
        livez,
        methods=["GET"],
        summary=summary,
        response_model=Health,
        responses={503: {"model": Health}},
    )
    router.add_api_route("/livez", livez, methods=["HEAD"], include_in_schema=False)
    summary = "Is the default version of every model ready"
    router.add_api_route(
        "/readyz",
        readyz,
        methods=["GET"],
        summary=summary,
        response_model=Readiness,
        responses={503: {"model": Readiness}},
    )
    router.add_api_route("/readyz", readyz, methods=["HEAD"], include_in_schema=False)
    if "inference" in roles:
        responses: dict[int | str, dict[str, object]] = {500: {"model": Health}}
        router.add_api_route(
            "/ping",
            ping,
            methods=["GET"],
            summary="Is the server healthy",
            response_model=Health,
            responses=responses,
            tags=["inference"],
        )
        router.add_api_route("/ping", ping, methods=UNDOCUMENTED_METHODS, include_in_schema=False)
    return router
