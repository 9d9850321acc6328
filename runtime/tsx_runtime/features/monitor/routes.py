"""The routes of monitoring and feedback, which pass on what the monitor process answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from tsx_archiver.monitor.config import HEADER_PREFIX, MonitorConfig
from tsx_runtime.api.management.schemas import parameters_of
from tsx_runtime.errors import BadRequest
from tsx_runtime.features.monitor.manager import MonitorManager
from tsx_runtime.features.monitor.report import Contest, FeedbackResult, MonitorReport
from tsx_runtime.features.monitor.settings import check_packages
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.management import ModelName
from tsx_runtime.http.routes.responses import json_answer, read_limited, read_object
from tsx_runtime.shared.redaction import is_secret_header

MAX_FEEDBACK_BYTES = 16 << 20
CONFIG_EXAMPLE = '{"share": "5%"}'
PATH = "/models/{model}/monitor"
FEEDBACK = {
    "description": (
        "One item, or a list of at most 10,000. An item has `request_id` or `key`, and `truth` or"
        " `contest`; it may have `groups`, `at`, `version` and `replace`."
    ),
    "anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}],
}
FEEDBACK_EXAMPLE = [
    {"request_id": "f7e9c1d2-3b4a-4c5d-8e6f-00000000002a", "truth": "cat"},
    {"key": "order-17", "contest": {"reason": "My income is not 0."}},
]
CONTEST_EXAMPLE = {"state": "corrected", "response": "It is a dog.", "truth": "dog"}


def build_router(manager: MonitorManager, limit: int) -> APIRouter:
    """Build the management routes; `limit` is the largest body in bytes."""
    router = APIRouter(tags=["monitoring"])
    errors = openapi.failures(400, 404, 409, 503)
    options: dict[str, Any] = {"response_model": MonitorReport, "responses": errors}

    @router.get(PATH, summary="Report on drift, quality and groups", **options)
    async def report(model: ModelName) -> Response:
        sampler = manager.find(model)
        if sampler is None:
            return json_answer(MonitorReport(model=model, monitoring=False))
        return await _pass_on(manager, "report", model, dropped=sampler.dropped)

    @router.put(
        PATH,
        summary="Monitor its inputs, answers and quality",
        openapi_extra=openapi.body_of(MonitorConfig, {"share": "5%", "groups": ["sex"]}),
        **options,
    )
    async def start(model: ModelName, request: Request) -> Response:
        values = await read_object(request, limit, CONFIG_EXAMPLE)
        config = parameters_of(MonitorConfig, values)
        check_packages("Monitoring")
        for item in (*config.groups, *(config.fields or ()), config.key or ""):
            name = item.removeprefix(HEADER_PREFIX)
            if name != item and is_secret_header(name):
                raise BadRequest(f"{item} may have a credential, so it is not monitored.")
        manager.set(model, config)
        return await report(model)

    @router.delete(PATH, summary="Stop monitoring", **options)
    async def stop(model: ModelName) -> Response:
        manager.set(model, None)
        return await report(model)

    @router.get(
        f"{PATH}/contests",
        summary="List contested answers",
        response_model=list[Contest],
        responses=errors,
    )
    async def contests(
        model: ModelName,
        state: Annotated[
            Literal["open", "upheld", "corrected"] | None, Query(description="only these")
        ] = None,
    ) -> Response:
        return await _pass_on(manager, "contests", model, state=state)

    @router.post(
        f"{PATH}/contests/{{id}}",
        summary="Answer a contest",
        response_model=Contest,
        responses=errors | openapi.failures(413),
        openapi_extra=openapi.json_body({"type": "object"}, CONTEST_EXAMPLE),
    )
    async def answer_contest(
        model: ModelName, id: Annotated[str, Path(description="of the contest")], request: Request
    ) -> Response:
        body = await read_limited(request, limit)
        return await _pass_on(manager, "answer_contest", model, body, id=id)

    @router.get(f"{PATH}/worst", summary="List the answers that were most wrong", responses=errors)
    async def worst(
        model: ModelName,
        version: Annotated[str | None, Query(description="the default one if not given")] = None,
        count: Annotated[int, Query(ge=1, le=100, description="how many at most")] = 10,
    ) -> Response:
        number = manager.registry.find(model, version).version
        return await _pass_on(manager, "worst", model, version=number, count=count)

    @router.get(
        f"{PATH}/requests/{{request_id:path}}", summary="Show one request", responses=errors
    )
    async def request(
        model: ModelName, request_id: Annotated[str, Path(description="the answer's x-request-id")]
    ) -> Response:
        return await _pass_on(manager, "request", model, request_id=request_id)

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
        openapi_extra=openapi.json_body(FEEDBACK, FEEDBACK_EXAMPLE),
    )
    async def feedback(model: ModelName, request: Request) -> Response:
        body = await read_limited(request, limit, "Feedback", "16 MiB")
        return await _pass_on(manager, "feedback", model, body)

    return router


async def _pass_on(
    manager: MonitorManager, operation: str, model: str, body: bytes = b"", **more: Any
) -> Response:
    if operation != "report":
        manager.check_store(model)
    status, answer = await manager.channel.call(operation, {"model": model, **more}, body)
    return Response(answer, status, media_type="application/json")
