"""The management routes of traffic: weights, sticky requests, rules, labels, and rollback."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from tsx_runtime.api.management.schemas import Flag
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.traffic.manager import TrafficState, UndoPoint
from tsx_runtime.core.traffic.routing import resolve_label
from tsx_runtime.errors import BadRequest, ModelVersionNotFound
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.management import ModelName
from tsx_runtime.http.routes.responses import json_answer, read_object
from tsx_runtime.settings.traffic_policy import Traffic, parse_traffic, warm_patterns

TRAFFIC = '{"weights": {"1.0": 90, "2.0": 10}}'
LABEL = '{"version": "2.0"}'

Force = Annotated[Flag, Query(description="accept versions that are not registered yet")]
DryRun = Annotated[Flag, Query(description="change nothing; answer what would change")]
LabelName = Annotated[str, Path(description="a version with this label", examples=["canary"])]


class Share(BaseModel):
    """What a version has now, and what became of the requests that it ever got."""

    version: str
    labels: list[str] = []
    registered: bool = True
    ready: bool
    share: float = Field(
        description=(
            "of the requests that name no version and that no rule sends anywhere, from 0 to 1"
        )
    )
    share_before: float | None = Field(
        default=None, description="in the answer to a change: the share before it"
    )
    requests: int = Field(
        description=(
            "that came since it was registered, by whatever name; also those that were refused"
        )
    )
    errors: int = Field(description="of them, those that failed: see tsx_errors_total")


class TrafficChange(BaseModel):
    """Without `before` it is new, without `after` it is gone."""

    what: str = Field(
        description="a part of the policy, or the default version", examples=["weights.2.0"]
    )
    before: Any = None
    after: Any = None


class ModelTraffic(BaseModel):
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
    """Now, or as it would be in `state`; compared with `before`. Raises ModelNotFound."""
    registry.find(name)
    model = registry.models[name]
    (policy, default), shares = (
        state or registry.traffic_manager.current_state(name),
        registry.shares(name, state),
    )
    numbers = sorted(
        {
            *model.versions,
            *(resolve_label(word, model.versions, policy.labels) for word in policy.targets),
        },
        key=natural,
    )
    table = [
        _share(number, model.versions.get(number), policy, shares.get(number, 0.0))
        for number in numbers
    ]
    shown = ModelTraffic(
        model=name,
        default=default,
        traffic=policy,
        table=table,
        undoable=len(registry.undo_points(name)),
    )
    if before is not None:
        shares = {share.version: share.share for share in before.table}
        for share in shown.table:
            share.share_before = shares.get(share.version, 0.0)
        shown.changes = _changes(before, shown)
    return shown


def _changes(before: ModelTraffic, after: ModelTraffic) -> list[TrafficChange]:
    one, other = _parts(before), _parts(after)
    return [
        TrafficChange(what=part, before=one.get(part), after=other.get(part))
        for part in {**one, **other}
        if one.get(part) != other.get(part)
    ]


def _parts(shown: ModelTraffic) -> dict[str, Any]:
    """The default version and the policy, each weight and label by itself."""
    parts: dict[str, Any] = {"default": shown.default}
    for key, value in shown.traffic.as_json().items():
        parts |= (
            {f"{key}.{name}": each for name, each in value.items()}
            if key in ("weights", "labels")
            else {key: value}
        )
    return parts


def natural(number: str) -> list[int | str]:
    """9 before 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", number)]


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
    requests = (
        sum(stats.answers.values()) + sum(stats.refusals.values()) + in_flight
    )  # errors may be of requests that were never accepted
    return Share(
        version=number,
        labels=labels,
        ready=version.ready,
        share=share,
        requests=requests,
        errors=stats.errors,
    )


def parsed(parse: Callable[[], Traffic]) -> Traffic:
    try:
        return parse()
    except ValueError as error:
        text = str(error)
        raise BadRequest(text if text.endswith("?") else f"{text}.") from error


def build_router(registry: Registry, limit: int) -> APIRouter:
    """Every route answers with the current traffic, once it is kept on the disk."""
    router = APIRouter(tags=["traffic"])
    path = "/models/{model}/traffic"
    answers: dict[str, Any] = {"response_model": ModelTraffic}
    wrong, conflict = openapi.failures(400, 404, 409, 413), openapi.failures(400, 404, 409)
    whole = openapi.body_of(Traffic, {"weights": {"1.0": 90, "2.0": 10}, "sticky": "header:X-User"})
    some = {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"type": "object"}, "example": {"sticky": None}}
            },
        }
    }

    async def given_traffic(request: Request) -> dict[str, Any]:
        """With its patterns compiled already, in a thread: a long one takes tens of
        milliseconds.
        """
        given = await read_object(request, limit, TRAFFIC)
        patterns = [
            rule.get("matches") for rule in given.get("rules") or () if isinstance(rule, dict)
        ]
        await asyncio.to_thread(
            warm_patterns, [pattern for pattern in patterns if isinstance(pattern, str)]
        )
        return given

    async def answer(
        model: str, before: ModelTraffic | None = None, undone: UndoPoint | None = None
    ) -> Response:
        await registry.state.written()
        shown = describe(registry, model, before=before)
        shown.undone = undone and datetime.fromtimestamp(undone.at, timezone.utc)
        return json_answer(shown)

    async def change(model: str, traffic: Traffic, mode: ChangeMode) -> Response:
        registry.check_traffic(model, traffic, force=mode.force)
        before = describe(registry, model)
        if mode.dry_run:
            return json_answer(
                describe(registry, model, TrafficState(traffic, before.default), before)
            )
        registry.set_traffic(model, traffic)
        return await answer(model, before)

    async def merge_in(model: str, changes: dict[str, Any], mode: ChangeMode) -> Response:
        return await change(model, parsed(lambda: registry.traffic(model).changed(changes)), mode)

    @router.get(
        path,
        summary="How requests are split between versions",
        responses=openapi.failures(404),
        **answers,
    )
    async def show(model: ModelName) -> Response:
        return await answer(model)

    @router.put(path, summary="Set it", responses=wrong, openapi_extra=whole, **answers)
    async def replace(model: ModelName, request: Request, mode: Mode) -> Response:
        given = await given_traffic(request)
        return await change(model, parsed(lambda: parse_traffic(given)), mode)

    @router.patch(
        path,
        summary="Change parts of the traffic policy; null removes a part",
        responses=wrong,
        openapi_extra=some,
        **answers,
    )
    async def merge(model: ModelName, request: Request, mode: Mode) -> Response:
        return await merge_in(model, await given_traffic(request), mode)

    @router.delete(
        path, summary="Send all requests to the default version", responses=conflict, **answers
    )
    async def clear(model: ModelName, mode: Mode) -> Response:
        # Labels stay: clients use them; requests that name no version are not affected.
        return await change(model, Traffic(labels=registry.traffic(model).labels), mode)

    _add_labels(router, registry, limit, merge_in)

    @router.post(
        "/models/{model}/rollback",
        summary=(
            "Undo the last change of traffic, labels or default version; the next call undoes the"
            " one before"
        ),
        responses=openapi.failures(404, 409),
        **answers,
    )
    async def rollback(model: ModelName, dry_run: DryRun = False) -> Response:
        before = describe(registry, model)
        point = registry.rollback(model, dry_run=dry_run)
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
    answers: dict[str, Any] = {"response_model": ModelTraffic}
    wrong, body = (
        openapi.failures(400, 404, 409, 413),
        openapi.body_of(LabelTarget, {"version": "2.0"}),
    )

    @router.put(
        path, summary="Set a label of a version", responses=wrong, openapi_extra=body, **answers
    )
    async def label(model: ModelName, label: LabelName, request: Request, mode: Mode) -> Response:
        given = await read_object(request, limit, LABEL)
        version = given.get("version")
        if not isinstance(version, str) or len(given) != 1:
            raise BadRequest(f"A label needs a version: {LABEL}.")
        return await change(model, {"labels": {label: version}}, mode)

    @router.delete(
        path, summary="Remove a label", responses=openapi.failures(400, 404, 409), **answers
    )
    async def unlabel(model: ModelName, label: LabelName, mode: Mode) -> Response:
        if model in registry.models and label not in registry.traffic(model).labels:
            raise ModelVersionNotFound(f"Model {model} has no label {label}.")
        return await change(model, {"labels": {label: None}}, mode)
