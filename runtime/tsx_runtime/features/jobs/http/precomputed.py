"""The route of precomputed predictions, whose responses `tsx batch` has stored.

Its path is `/predictions/{model}/precomputed/{key}`.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Response

from tsx_runtime.api import urls
from tsx_runtime.api.headers import answer_headers, stored_headers
from tsx_runtime.errors import ResourceNotFound
from tsx_runtime.features.jobs.service import Jobs
from tsx_runtime.features.jobs.storage.store import PRECOMPUTED, AnswerKey
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.management import ModelName

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "what the handler returned in the batch",
        "content": {"*/*": {"schema": {}}},
    }
}


def build_router(jobs: Jobs, *, is_confined: bool) -> APIRouter:
    """Build the route; `answer_headers` describes `is_confined`."""
    router = APIRouter(tags=["inference"])

    @router.get(
        f"/predictions/{{model}}/{urls.PRECOMPUTED}/{{key:path}}",
        summary="Get an answer that was computed in advance",
        response_class=Response,
        responses=openapi.failures(404, 503) | _RESPONSES,
    )
    async def precomputed(
        model: ModelName,
        key: Annotated[
            str, Path(description="the row's id, or its field that `tsx batch --id-field` names")
        ],
    ) -> Response:
        answer = (
            await jobs.store.get_answer(AnswerKey(PRECOMPUTED, model, key))
            if await jobs.is_open()
            else None
        )
        if answer is None or answer.status is None:
            text = f"No answer of {model} is stored under {key!r}, or it has expired."
            raise ResourceNotFound(f"{text} `tsx batch -o jobs+sqlite:///FILE` stores answers.")
        pairs = answer_headers(
            answer.sound_status, stored_headers(answer.headers), is_confined=is_confined
        )
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        return Response(answer.body, answer.sound_status, headers=headers)

    return router
