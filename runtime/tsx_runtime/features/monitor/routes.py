"""The routes of monitoring and feedback, which pass on what the monitor process answers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.api.management.schemas import parameters_of
from tsx_runtime.api.messages import read_body
from tsx_runtime.errors import BadRequest, Conflict, PayloadTooLarge
from tsx_runtime.features.monitor.manager import INSTALL, PACKAGES, MonitorManager
from tsx_runtime.features.monitor.report import FeedbackResult, MonitorReport
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.management import ModelName
from tsx_runtime.http.routes.responses import json_answer, read_object

MAX_FEEDBACK_BYTES = 16 << 20
MAX_WORST = 100
CONFIG_EXAMPLE = '{"share": "5%"}'
FEEDBACK_EXAMPLE = [
    {"request_id": "f7e9c1d2-3b4a-4c5d-8e6f-00000000002a", "truth": "cat"},
    {"key": "order-17", "truth": 41.5, "groups": {"region": "north"}},
]
ITEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "request_id": {"type": "string", "description": "the answer's x-request-id"},
        "key": {
            "type": "string",
            "description": "in place of request_id: the value at the monitoring's `key`",
        },
        "truth": {"description": "the right answer, or a list with one for each row"},
        "contest": {
            "type": "object",
            "properties": {"reason": {"type": "string"}},
            "description": "asks that a person looks at the answer",
        },
        "groups": {"type": "object", "additionalProperties": {"type": "string"}},
        "at": {"description": "time of the truth: seconds since 1970, or ISO 8601"},
        "version": {"type": "string"},
        "replace": {"type": "boolean", "description": "replaces an earlier truth"},
    },
}
ANSWER_SCHEMA = {
    "type": "object",
    "required": ["state"],
    "properties": {
        "state": {"enum": ["upheld", "corrected"]},
        "response": {"type": "string", "description": "what the person answers"},
        "truth": {"description": "the right answer, if it is corrected"},
    },
}


def _json_body(schema: dict[str, Any], example: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


async def _pass_on(
    manager: MonitorManager, operation: str, arguments: dict[str, Any], body: bytes = b""
) -> Response:
    status, answer = await manager.channel.call(operation, arguments, body)
    return Response(answer, status, media_type="application/json")


def _monitored(manager: MonitorManager, model: str) -> None:
    if manager.find(model) is None:
        raise Conflict(
            f"Model {model} is not monitored. Turn it on: tsx models monitor {model}, or PUT"
            f" /models/{model}/monitor"
        )


def build_router(manager: MonitorManager, limit: int) -> APIRouter:
    """Build the management routes; `limit` is the largest body in bytes."""
    router = APIRouter(tags=["monitoring"])
    path = "/models/{model}/monitor"
    errors = openapi.failures(404, 409, 503)

    def describe(model: str) -> Response:
        sampler = manager.find(model)
        facts = {"model": model, "monitoring": sampler is not None}
        if sampler is not None:
            facts["config"] = sampler.config
        return json_answer(MonitorReport.model_validate(facts))

    @router.put(
        path,
        summary="Monitor its inputs, answers and quality",
        response_model=MonitorReport,
        responses=openapi.failures(400, 404, 413),
        openapi_extra=openapi.body_of(MonitorConfig, {"share": "5%", "groups": ["sex"]}),
    )
    async def start(model: ModelName, request: Request) -> Response:
        values = await read_object(request, limit, CONFIG_EXAMPLE)
        config = parameters_of(MonitorConfig, values)
        if not all(map(find_spec, PACKAGES)):
            raise BadRequest(f"Monitoring {INSTALL}")
        manager.set(model, config)
        return describe(model)

    @router.get(
        path,
        summary="Report on drift, quality and groups",
        response_model=MonitorReport,
        responses=openapi.failures(404, 503),
    )
    async def report(model: ModelName) -> Response:
        sampler = manager.find(model)
        if sampler is None:
            return describe(model)
        arguments = {"model": model, "dropped": dict(sampler.dropped)}
        return await _pass_on(manager, "report", arguments)

    @router.delete(
        path,
        summary="Stop monitoring",
        response_model=MonitorReport,
        responses=openapi.failures(404),
    )
    async def stop(model: ModelName) -> Response:
        manager.set(model, None)
        return describe(model)

    @router.get(f"{path}/contests", summary="List contested answers", responses=errors)
    async def contests(
        model: ModelName,
        state: Annotated[
            Literal["open", "upheld", "corrected"] | None, Query(description="only these")
        ] = None,
    ) -> Response:
        manager.check_store(model)
        return await _pass_on(manager, "contests", {"model": model, "state": state})

    @router.post(
        f"{path}/contests/{{id}}",
        summary="Answer a contest",
        responses=openapi.failures(400, 404, 409, 413, 503),
        openapi_extra=_json_body(
            ANSWER_SCHEMA, {"state": "corrected", "response": "It is a dog.", "truth": "dog"}
        ),
    )
    async def answer_contest(
        model: ModelName, id: Annotated[str, Path(description="of the contest")], request: Request
    ) -> Response:
        manager.check_store(model)
        body = await read_body(request.scope, request.receive, limit)
        return await _pass_on(manager, "answer_contest", {"model": model, "id": id}, body)

    @router.get(f"{path}/worst", summary="List the answers that were most wrong", responses=errors)
    async def worst(
        model: ModelName,
        version: Annotated[str | None, Query(description="the default one if not given")] = None,
        count: Annotated[int, Query(ge=1, le=MAX_WORST, description="how many at most")] = 10,
    ) -> Response:
        _monitored(manager, model)
        number = manager.version_of(model, version)
        return await _pass_on(manager, "worst", {"model": model, "version": number, "count": count})

    @router.get(
        f"{path}/requests/{{request_id:path}}",
        summary="Describe the answer to one request",
        responses=errors,
    )
    async def request(
        model: ModelName,
        request_id: Annotated[str, Path(description="the answer's x-request-id")],
    ) -> Response:
        manager.check_store(model)
        return await _pass_on(manager, "request", {"model": model, "request_id": request_id})

    return router


def build_feedback_router(manager: MonitorManager, limit: int) -> APIRouter:
    """Build the route of feedback; `limit` is the largest body of a request in bytes."""
    router = APIRouter(tags=["inference"])
    limit = min(limit, MAX_FEEDBACK_BYTES)

    @router.post(
        "/feedback/{model}",
        summary="Report the truth of answers, or contest one",
        response_model=FeedbackResult,
        responses=openapi.failures(400, 401, 404, 409, 413, 503),
        openapi_extra=_json_body(
            {"anyOf": [ITEM_SCHEMA, {"type": "array", "items": ITEM_SCHEMA, "maxItems": 10_000}]},
            FEEDBACK_EXAMPLE,
        ),
    )
    async def feedback(model: ModelName, request: Request) -> Response:
        manager.check_store(model)
        try:
            body = await read_body(request.scope, request.receive, limit)
        except PayloadTooLarge as error:
            text = (
                f"Feedback may have at most {limit} bytes, the smaller of 16 MiB and"
                " max_request_size. Send the list in parts."
            )
            raise PayloadTooLarge(text, more=error.more) from None
        return await _pass_on(manager, "feedback", {"model": model}, body)

    return router
