"""The management routes of rollouts: start, show and stop a rollout."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from tsx_runtime.api.management.schemas import parameters_of
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import RolloutNotFound
from tsx_runtime.features.rollouts.controller import RolloutController, describe_counts
from tsx_runtime.features.rollouts.policy import RolloutPlan, RolloutState, Status
from tsx_runtime.features.rollouts.quality import MetricComparison
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.management import ModelName
from tsx_runtime.http.routes.responses import json_answer, read_object

PLAN_EXAMPLE = '{"version": "2.0", "steps": [1, 5, 25, 100], "bake": 600}'
EXAMPLE: dict[str, Any] = {
    "version": "2.0",
    "steps": [1, 5, 25, 100],
    "bake": 600,
    "max_error_rate": 0.005,
    "max_p99_ratio": 1.2,
}


class Numbers(BaseModel):
    """The counts and latencies of a version."""

    requests: int
    errors: int
    error_rate: float
    p50_ms: float | None = Field(
        default=None, description="left out where there were no requests, as is p99_ms"
    )
    p99_ms: float | None = None


class ModelRollout(BaseModel):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "digits", "status": "running", "plan": EXAMPLE}]}
    )

    model: str
    status: Status
    old: str = Field(description="the version that had the requests before")
    plan: RolloutPlan
    step: int = Field(description="from 1")
    share: float = Field(description="share of the new version at this step, in percent")
    seconds: float = Field(description="time at this step")
    reason: str = Field(description="reason of the last decision")
    began: float = Field(description="seconds since 1970")
    changed: float = Field(description="seconds since 1970 of the last step, or of the end")
    new_counts: Numbers = Field(description="numbers of the new version at this step")
    old_counts: Numbers = Field(description="numbers of the old version at this step")
    metric: MetricComparison | None = Field(
        default=None, description="the metric of the plan, at the last decision"
    )
    log: list[dict[str, Any]] = Field(description="each decision with its numbers, the newest last")


def describe(name: str, state: RolloutState, log: list[dict[str, Any]]) -> ModelRollout:
    return ModelRollout(
        model=name,
        step=state.step + 1,
        share=state.share,
        seconds=round(state.seconds, 1),
        new_counts=Numbers(**describe_counts(state.new)),
        old_counts=Numbers(**describe_counts(state.old_now)),
        log=log,
        **state.model_dump(
            include={"status", "old", "plan", "reason", "began", "changed", "metric"}
        ),
    )


def build_router(registry: Registry, rollouts: RolloutController, limit: int) -> APIRouter:
    """Build the routes; they return the current rollout after it has been written to disk."""
    router = APIRouter(tags=["traffic"])
    path = "/models/{model}/rollout"
    route_options: dict[str, Any] = {"response_model": ModelRollout}

    @router.post(
        path,
        summary=(
            "Move the requests to another version step by step while it stays within its bounds"
        ),
        responses=openapi.failures(400, 404, 409, 413),
        openapi_extra=openapi.body_of(RolloutPlan, EXAMPLE),
        **route_options,
    )
    async def start(model: ModelName, request: Request) -> Response:
        rollouts.start(
            model, parameters_of(RolloutPlan, await read_object(request, limit, PLAN_EXAMPLE))
        )
        return await show(model)

    @router.get(
        path,
        summary="The current rollout, or the last one",
        responses=openapi.failures(404),
        **route_options,
    )
    async def show(model: ModelName) -> Response:
        registry.find(model)
        state = rollouts.find(model)
        if state is None:
            raise RolloutNotFound(
                f"Model {model} has no rollout. Start one: POST /models/{model}/rollout"
            )
        await registry.state.written()
        return json_answer(describe(model, state, rollouts.logs.read(model)))

    @router.delete(
        path, summary="End it", responses=openapi.failures(400, 404, 409), **route_options
    )
    async def stop(
        model: ModelName,
        back: Annotated[
            bool,
            Query(description="return to the old version; if false, the shares stay as they are"),
        ] = True,
    ) -> Response:
        registry.find(model)
        rollouts.stop(model, back=back)
        return await show(model)

    return router
