"""The management routes of traffic: weights, sticky requests, rules, labels, and rollback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from tsx_runtime.api.management.schemas import Flag
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.traffic.manager import TrafficState, UndoPoint
from tsx_runtime.core.traffic.routing import resolve_label, version_sort_key
from tsx_runtime.errors import BadRequest, ModelVersionNotFound
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.management import Force, ModelName
from tsx_runtime.http.routes.responses import json_answer, parse_policy, read_object
from tsx_runtime.settings.traffic_policy import Traffic, parse_traffic, warm_patterns

TRAFFIC_EXAMPLE = '{"weights": {"1.0": 90, "2.0": 10}}'
LABEL_EXAMPLE = '{"version": "2.0"}'

DryRun = Annotated[Flag, Query(description="change nothing; answer what would change")]
LabelName = Annotated[str, Path(description="a version with this label", examples=["canary"])]


class Share(BaseModel):
    """The share of requests that a version gets now, and the number of its requests and errors."""

    version: str
    labels: list[str] = []
    registered: bool = True
    ready: bool
    share: float = Field(
        description=(
            "share of the requests that name no version and that no rule matches, from 0 to 1"
        )
    )
    share_before: float | None = Field(
        default=None, description="in the answer to a change: the share before it"
    )
    requests: int = Field(
        description=(
            "requests since it was registered, by any of its names; refused ones are included"
        )
    )
    errors: int = Field(description="requests that failed: see tsx_errors_total")


class TrafficChange(BaseModel):
    """A change of one part of the policy; a new part has no `before`, a removed one no `after`."""

    what: str = Field(
        description="a part of the policy, or the default version", examples=["weights.2.0"]
    )
    before: Any = None
    after: Any = None


class ModelTraffic(BaseModel):
    """The traffic policy of a model, and its effect on each version."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "digits", "default": "1.0", "traffic": {}, "table": []}]
        }
    )

    model: str
    default: str = Field(description="the version that answers requests without a traffic policy")
    traffic: Traffic
    table: list[Share]
    undoable: int = Field(
        default=0, description="changes that rollback can undo, one a call, the newest first"
    )
    changes: list[TrafficChange] | None = Field(
        default=None, description="in the answer to a change: what it changed"
    )
    undone: datetime | None = Field(
        default=None,
        description="in the answer to a rollback: when the change that it undid was made",
    )


class ChangeMode(NamedTuple):
    force: bool
    dry_run: bool


def _mode(force: Force = False, dry_run: DryRun = False) -> ChangeMode:
    return ChangeMode(force, dry_run)


Mode = Annotated[ChangeMode, Depends(_mode)]


class LabelTarget(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: str


def describe(
    registry: Registry,
    name: str,
    state: TrafficState | None = None,
    before: ModelTraffic | None = None,
) -> ModelTraffic:
    """Describe the traffic of a model.

    Args:
        registry: The models.
        name: The name of the model.
        state: The state to describe; None means the current one.
        before: An earlier description; if given, the result lists the changes since.

    Raises:
        ModelNotFound: The model is unknown.
    """
    registry.find(name)
    model = registry.models[name]
    policy, default = state or registry.traffic_manager.current_state(name)
    shares = registry.shares(name, state)
    numbers = sorted(
        {
            *model.versions,
            *(resolve_label(target, model.versions, policy.labels) for target in policy.targets),
        },
        key=version_sort_key,
    )
    table = [
        _share(number, model.versions.get(number), policy, shares.get(number, 0.0))
        for number in numbers
    ]
    description = ModelTraffic(
        model=name,
        default=default,
        traffic=policy,
        table=table,
        undoable=len(registry.traffic_manager.undo_points(name)),
    )
    if before is not None:
        shares = {share.version: share.share for share in before.table}
        for share in description.table:
            share.share_before = shares.get(share.version, 0.0)
        description.changes = _changes(before, description)
    return description


def _changes(before: ModelTraffic, after: ModelTraffic) -> list[TrafficChange]:
    old, new = _parts(before), _parts(after)
    return [
        TrafficChange(what=part, before=old.get(part), after=new.get(part))
        for part in {**old, **new}
        if old.get(part) != new.get(part)
    ]


def _parts(description: ModelTraffic) -> dict[str, Any]:
    """Return the default version and the policy as parts; each weight and label is a part."""
    parts: dict[str, Any] = {"default": description.default}
    for key, value in description.traffic.as_json().items():
        parts |= (
            {f"{key}.{name}": entry for name, entry in value.items()}
            if key in ("weights", "labels")
            else {key: value}
        )
    return parts


def _share(number: str, version: ModelVersion | None, policy: Traffic, share: float) -> Share:
    labels = [label for label, meaning in policy.labels.items() if meaning == number]
    if version is None:
        return Share(
            version=number,
            labels=labels,
            registered=False,
            ready=False,
            share=0.0,
            requests=0,
            errors=0,
        )
    stats = version.stats
    in_flight = stats.requests - stats.ended
    # Refused requests are included, because `errors` includes them too.
    requests = sum(stats.answers.values()) + sum(stats.refusals.values()) + in_flight
    return Share(
        version=number,
        labels=labels,
        ready=version.ready,
        share=share,
        requests=requests,
        errors=stats.errors,
    )


def build_router(registry: Registry, limit: int) -> APIRouter:
    """Build the routes; they return the current traffic after it has been written to disk."""
    router = APIRouter(tags=["traffic"])
    path = "/models/{model}/traffic"
    route_options: dict[str, Any] = {"response_model": ModelTraffic}
    write_errors = openapi.failures(400, 404, 409, 413)
    clear_errors = openapi.failures(400, 404, 409)
    policy_body = openapi.body_of(
        Traffic, {"weights": {"1.0": 90, "2.0": 10}, "sticky": "header:X-User"}
    )
    patch_body = {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"type": "object"}, "example": {"sticky": None}}
            },
        }
    }

    async def read_policy(request: Request) -> dict[str, Any]:
        """Read a policy, and compile its patterns in a thread.

        Compiling a long pattern takes tens of milliseconds.
        """
        policy = await read_object(request, limit, TRAFFIC_EXAMPLE)
        patterns = [
            rule.get("matches") for rule in policy.get("rules") or () if isinstance(rule, dict)
        ]
        await asyncio.to_thread(
            warm_patterns, [pattern for pattern in patterns if isinstance(pattern, str)]
        )
        return policy

    async def answer(
        model: str, before: ModelTraffic | None = None, undone: UndoPoint | None = None
    ) -> Response:
        await registry.state.written()
        description = describe(registry, model, before=before)
        description.undone = undone and datetime.fromtimestamp(undone.at, timezone.utc)
        return json_answer(description)

    async def change(model: str, traffic: Traffic, mode: ChangeMode) -> Response:
        registry.traffic_manager.check_traffic(model, traffic, force=mode.force)
        before = describe(registry, model)
        if mode.dry_run:
            return json_answer(
                describe(registry, model, TrafficState(traffic, before.default), before)
            )
        registry.set_traffic(model, traffic)
        return await answer(model, before)

    async def merge_changes(model: str, changes: dict[str, Any], mode: ChangeMode) -> Response:
        return await change(
            model, parse_policy(lambda: registry.traffic(model).changed(changes)), mode
        )

    @router.get(
        path,
        summary="How requests are split between versions",
        responses=openapi.failures(404),
        **route_options,
    )
    async def show(model: ModelName) -> Response:
        return await answer(model)

    @router.put(
        path, summary="Set it", responses=write_errors, openapi_extra=policy_body, **route_options
    )
    async def replace(model: ModelName, request: Request, mode: Mode) -> Response:
        policy = await read_policy(request)
        return await change(model, parse_policy(lambda: parse_traffic(policy)), mode)

    @router.patch(
        path,
        summary="Change parts of the traffic policy; null removes a part",
        responses=write_errors,
        openapi_extra=patch_body,
        **route_options,
    )
    async def merge(model: ModelName, request: Request, mode: Mode) -> Response:
        return await merge_changes(model, await read_policy(request), mode)

    @router.delete(
        path,
        summary="Send all requests to the default version",
        responses=clear_errors,
        **route_options,
    )
    async def clear(model: ModelName, mode: Mode) -> Response:
        # Labels stay, because clients use them and they do not affect other requests.
        return await change(model, Traffic(labels=registry.traffic(model).labels), mode)

    _add_labels(router, registry, limit, merge_changes)

    @router.post(
        "/models/{model}/rollback",
        summary=(
            "Undo the last change of traffic, labels or default version; the next call undoes the"
            " one before"
        ),
        responses=openapi.failures(404, 409),
        **route_options,
    )
    async def rollback(model: ModelName, dry_run: DryRun = False) -> Response:
        before = describe(registry, model)
        point = registry.traffic_manager.rollback(model, dry_run=dry_run)
        if dry_run:
            return json_answer(describe(registry, model, point.state, before))
        return await answer(model, before, point)

    return router


def _add_labels(
    router: APIRouter,
    registry: Registry,
    limit: int,
    change: Callable[[str, dict[str, Any], ChangeMode], Awaitable[Response]],
) -> None:
    path = "/models/{model}/labels/{label}"
    route_options: dict[str, Any] = {"response_model": ModelTraffic}
    write_errors = openapi.failures(400, 404, 409, 413)
    body = openapi.body_of(LabelTarget, {"version": "2.0"})

    @router.put(
        path,
        summary="Set a label of a version",
        responses=write_errors,
        openapi_extra=body,
        **route_options,
    )
    async def label(model: ModelName, label: LabelName, request: Request, mode: Mode) -> Response:
        target = await read_object(request, limit, LABEL_EXAMPLE)
        version = target.get("version")
        if not isinstance(version, str) or len(target) != 1:
            raise BadRequest(f"A label needs a version: {LABEL_EXAMPLE}.")
        return await change(model, {"labels": {label: version}}, mode)

    @router.delete(
        path, summary="Remove a label", responses=openapi.failures(400, 404, 409), **route_options
    )
    async def unlabel(model: ModelName, label: LabelName, mode: Mode) -> Response:
        if model in registry.models and label not in registry.traffic(model).labels:
            raise ModelVersionNotFound(f"Model {model} has no label {label}.")
        return await change(model, {"labels": {label: None}}, mode)
