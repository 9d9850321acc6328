"""The management routes of shadows: start a shadow, show its results, reset its counters."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from tsx_runtime.core.comparison.significance import wilson_interval
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.features.shadows.manager import ShadowManager, only_server_text
from tsx_runtime.features.shadows.mirror import Mirror
from tsx_runtime.features.shadows.report import Example, Excerpt, Side
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.management import Force, ModelName
from tsx_runtime.http.routes.responses import json_answer, parse_policy, read_object
from tsx_runtime.settings.traffic_policy import Shadow, parse_traffic

SHADOW_EXAMPLE = '{"to": "2.0", "share": 10}'
EXAMPLE = {"to": "2.0", "share": 10, "compare": {"kind": "top-k", "k": 1}}


class Requests(BaseModel):
    copied: int
    under_way: int = Field(description="copied requests that are not compared yet")
    shed: dict[str, int] = Field(
        description="requests that were not copied, or that the shadow refused, by reason"
    )


class Errors(BaseModel):
    """The numbers of answers with a status of 500 or more, and of failed comparisons."""

    primary: int
    shadow: int
    comparison: int


class Rate(BaseModel):
    """A fraction of the compared answers, from 0 to 1.

    The 95 % confidence interval of the true rate is from `low` to `high`.
    """

    rate: float
    low: float
    high: float


class Tolerance(BaseModel):
    """The tolerance of two numbers, which may differ by `atol + rtol * |primary number|`."""

    rtol: float
    atol: float


class Milliseconds(BaseModel):
    """The percentiles of a latency in milliseconds."""

    p50: float
    p99: float


class Latencies(BaseModel):
    """The latencies of the newest compared requests, from the request to the answer."""

    requests: int
    primary: Milliseconds
    shadow: Milliseconds


class Content(BaseModel):
    """The beginning of a body: as text if it is UTF-8, else in base64."""

    size: int
    text: str | None = None
    base64: str | None = None


class ShadowAnswer(BaseModel):
    """The answer of one of the two versions."""

    version: str
    status: int
    ms: float
    headers: dict[str, str]
    body: Content


class ShadowExample(BaseModel):
    """A request for which the two versions gave different answers."""

    at: datetime
    why: str
    request_id: str
    headers: dict[str, str] = Field(description="without those whose names sound like credentials")
    body: Content
    primary: ShadowAnswer
    shadow: ShadowAnswer


class ShadowStatus(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "digits", "state": "off"}]})

    model: str
    state: str = Field(description="off, running, or waiting", examples=["running"])
    why: str | None = Field(default=None, description="why it waits")
    shadow: Shadow | None = Field(
        default=None, description="the shadow of the traffic policy; if it is off, the last one"
    )
    version: str | None = Field(default=None, description="version that gets the copies")
    since: datetime | None = None
    requests: Requests | None = None
    agreed: int | None = None
    disagreed: int | None = None
    disagreement: Rate | None = None
    largest_difference: float | None = Field(
        default=None,
        description="largest difference of two numbers in all compared answers, numeric and exact",
    )
    tolerance: Tolerance | None = Field(
        default=None,
        description="tolerance of a numeric comparison; by default that of the coarser precision",
    )
    errors: Errors | None = None
    last_problem: str | None = Field(default=None, description="why an answer was not compared")
    latency: Latencies | None = None
    examples: list[ShadowExample] | None = Field(
        default=None, description="requests whose answers differ, the newest first"
    )


def report(registry: Registry, shadows: ShadowManager, name: str) -> ShadowStatus:
    """Describe the shadow of a model.

    Raises:
        ModelNotFound: The model is unknown.
    """
    registry.find(name)
    mirror = shadows.get(name)
    if mirror is None:
        return ShadowStatus(model=name, state="off")
    results = mirror.report
    compared_count = results.agreed + results.disagreed
    rtol, atol = shadows.tolerance(mirror)
    low, high = wilson_interval(results.disagreed, compared_count)
    state, reason = _state(registry, mirror)
    percentiles = [
        Milliseconds(p50=round(1000 * p50, 3), p99=round(1000 * p99, 3))
        for p50, p99 in results.latencies()
    ]
    return ShadowStatus(
        model=name,
        state=state,
        why=reason,
        shadow=mirror.config,
        version=mirror.number,
        since=results.since,
        requests=Requests(
            copied=results.copied, under_way=len(mirror.copies_in_flight), shed=dict(results.shed)
        ),
        agreed=results.agreed,
        disagreed=results.disagreed,
        disagreement=(
            Rate(rate=results.disagreed / compared_count, low=low, high=high)
            if compared_count
            else None
        ),
        largest_difference=(
            results.largest_difference
            if compared_count and mirror.config.compare.kind in ("numeric", "exact")
            else None
        ),
        tolerance=(
            Tolerance(rtol=rtol, atol=atol) if mirror.config.compare.kind == "numeric" else None
        ),
        errors=Errors(
            primary=results.primary_errors,
            shadow=results.shadow_errors,
            comparison=results.uncompared,
        ),
        last_problem=results.last_problem or None,
        latency=(
            Latencies(requests=len(results.pairs), primary=percentiles[0], shadow=percentiles[1])
            if percentiles
            else None
        ),
        examples=[_example(example) for example in reversed(results.examples)],
    )


def _state(registry: Registry, mirror: Mirror) -> tuple[str, str | None]:
    model, traffic = registry.models[mirror.name], registry.traffic(mirror.name)
    if traffic.shadow is None:
        return "off", None
    if mirror.problem is not None:
        return "waiting", mirror.problem
    version = model.versions.get(mirror.number)
    if version is None:
        return "waiting", f"Version {mirror.number} is not registered."
    if reason := only_server_text(model, traffic):
        return "waiting", reason
    return (
        ("running", None)
        if version.ready
        else ("waiting", f"No worker serves version {mirror.number} now.")
    )


def _example(example: Example) -> ShadowExample:
    return ShadowExample(
        at=example.at,
        why=example.reason,
        request_id=example.request_id,
        headers=dict(example.headers),
        body=_content(example.body),
        primary=_describe_answer(example.primary),
        shadow=_describe_answer(example.shadow),
    )


def _describe_answer(side: Side) -> ShadowAnswer:
    headers = dict(side.headers)
    return ShadowAnswer(
        version=side.version,
        status=side.status,
        ms=round(1000 * side.seconds, 3),
        headers=headers,
        body=_content(side.body),
    )


def _content(body: Excerpt) -> Content:
    is_complete = body.size == len(body.start)
    for end in (
        (0,) if is_complete else (0, 1, 2, 3)
    ):  # The excerpt may end inside a character of up to 4 bytes.
        try:
            return Content(size=body.size, text=body.start[: len(body.start) - end].decode())
        except UnicodeDecodeError:
            continue
    return Content(size=body.size, base64=base64.b64encode(body.start).decode())


def build_router(registry: Registry, shadows: ShadowManager, limit: int) -> APIRouter:
    router = APIRouter(tags=["traffic"])
    route_options: dict[str, Any] = {"response_model": ShadowStatus}

    @router.get(
        "/models/{model}/shadow",
        summary="Results of the shadow",
        responses=openapi.failures(404),
        **route_options,
    )
    async def show(model: ModelName) -> Response:
        return json_answer(report(registry, shadows, model))

    @router.put(
        "/models/{model}/shadow",
        summary="Copy a share of the requests to another version",
        responses=openapi.failures(400, 404, 409, 413),
        openapi_extra=openapi.body_of(Shadow, EXAMPLE),
        **route_options,
    )
    async def begin(model: ModelName, request: Request, force: Force = False) -> Response:
        shadow = await read_object(request, limit, SHADOW_EXAMPLE)
        traffic = parse_policy(
            lambda: parse_traffic(registry.traffic(model).as_json() | {"shadow": shadow})
        )
        registry.traffic_manager.check_traffic(model, traffic, force=force)
        registry.set_traffic(model, traffic)
        await registry.state.written()
        return json_answer(report(registry, shadows, model))

    @router.delete(
        "/models/{model}/shadow",
        summary="Reset counters",
        responses=openapi.failures(404),
        **route_options,
    )
    async def reset(model: ModelName) -> Response:
        """Reset the counters of a shadow.

        `PATCH /models/{model}/traffic` with `{"shadow": null}` ends the shadow itself.
        """
        report(registry, shadows, model)
        if (mirror := shadows.get(model)) is not None:
            mirror.reset()
        return json_answer(report(registry, shadows, model))

    return router
