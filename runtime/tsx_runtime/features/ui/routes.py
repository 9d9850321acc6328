"""The routes of the web page: its files at `/ui`, and the API that it calls at `/ui/api`.

The files contain no secrets, so they need no token. The API needs a token of the management API.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import mimetypes
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Query, Request, Response

from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.errors import NOT_FOUND
from tsx_runtime.api.management import samples
from tsx_runtime.api.management.describe import memory_of
from tsx_runtime.api.messages import Receive, Scope, Send, without_headers
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import ResourceNotFound
from tsx_runtime.features.ui import state as page_state
from tsx_runtime.features.ui.time_series import TimeSeries
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.asgi_lane.predictions import Predictions
from tsx_runtime.http.page import PAGE_CREDENTIALS, check_page, is_page_prediction, use_model_path
from tsx_runtime.http.routes import model_paths
from tsx_runtime.metrics import collection
from tsx_runtime.metrics.exposition import Families

EXAMPLE = "example.json"  # name of the sample for a request that the handler itself describes
FOLDER = Path(__file__).resolve().with_name("static")
INDEX_PAGE = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# The page loads nothing from other origins, has no inline code, and cannot be shown in a frame.
# `blob:` allows it to show a user's pictures from memory.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
# headers of responses that only the web page may read
DATA_HEADERS = {"x-content-type-options": "nosniff", "cross-origin-resource-policy": "same-origin"}
HEADERS = DATA_HEADERS | {
    "content-security-policy": POLICY,
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
VARY_HEADER = {"vary": "accept-encoding"}
MODEL_LABELS = ("model_name", "ModelName")


def add_page(app: ServerApp, series: TimeSeries) -> None:
    """Add the page, its API, and its playground to a listener."""
    context = app.context
    registry, guard = context.registry, context.guards.management
    read_metrics = collection.reader(registry, app.counts, context.system)
    playground = Playground(
        registry,
        context.settings.max_request_size,
        guard,
        app.counts,
        model_paths.describe_predictions,
        is_confined=app.is_confined,
    )
    app.apps.append((is_page_prediction, playground))
    router = APIRouter(include_in_schema=False)
    _add_files(router)
    api = _build_api(registry, series, read_metrics, guard, context.addresses)
    router.include_router(api, prefix="/ui/api")
    app.add_routes(router, {"ui": page_guard(guard)})
    app.paths["/ui/"] = {"GET": "The web page"}


def page_guard(guard: Guard | None) -> Guard | None:
    """Return the guard of the page's files, which checks the hosts but no token.

    A browser has no token until the loaded page has asked the user for it.
    """
    return (
        None
        if guard is None or guard.hosts is None
        else guard._replace(key=None, plugins=(), same_site=False)
    )


def _add_files(router: APIRouter) -> None:
    async def index_page(request: Request) -> Response:
        if not str(request.scope.get("raw_path", b"/"), "latin-1").endswith("/"):
            # A relative location is also correct if a proxy adds a prefix.
            return Response(status_code=308, headers={"location": "ui/"})
        return await file(INDEX_PAGE, request)

    async def file(name: str, request: Request) -> Response:
        return answer_file(files().get(name), request)

    router.add_api_route("/ui", index_page, methods=["GET", "HEAD"])
    router.add_api_route("/ui/{name}", file, methods=["GET", "HEAD"])


def answer_file(
    file: File | None, request: Request, headers: Mapping[str, str] = HEADERS
) -> Response:
    """Return a response with the file, compressed if the client accepts that.

    Raises:
        ResourceNotFound: The file is None.
    """
    if file is None:
        raise ResourceNotFound(NOT_FOUND)
    headers = {**headers, **VARY_HEADER}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            file.compressed, media_type=file.type, headers=headers | {"content-encoding": "gzip"}
        )
    return Response(file.body, media_type=file.type, headers=headers)


def _build_api(
    registry: Registry,
    series: TimeSeries,
    read_metrics: Any,
    guard: Guard | None,
    addresses: Mapping[str, str],
) -> APIRouter:
    server = page_state.describe_server(registry.settings, addresses, uuid.uuid4().hex)

    async def check(request: Request) -> None:
        if guard is not None:
            guard.check(request.scope["headers"])

    router = APIRouter(dependencies=[Depends(check)])

    @router.get("/state")
    async def state(since: Annotated[int, Query(ge=0)] = 0) -> Response:
        memory = await asyncio.to_thread(memory_of, registry.workers())
        return _json(page_state.describe(registry, series, since, server, memory))

    @router.get("/store")
    async def store() -> Response:
        return _json(await asyncio.to_thread(page_state.archives_in, registry.settings.model_store))

    @router.get("/errors/{model}")
    async def errors(model: str) -> Response:
        registry.find(model)
        return _json(page_state.errors_of(registry.models[model].versions.values()))

    @router.get("/server")
    async def process() -> Response:
        return _json(await asyncio.to_thread(page_state.describe_process, registry.settings))

    @router.get("/log")
    async def log_of_models() -> Response:
        models = registry.models.values()
        return _json(
            page_state.recent_lines(
                version for model in models for version in model.versions.values()
            )
        )

    @router.get("/log/{model}")
    async def log(model: str) -> Response:
        registry.find(model)
        return _json(page_state.recent_lines(registry.models[model].versions.values()))

    @router.get("/metrics/{model}")
    async def metrics(model: str) -> Response:
        registry.find(model)
        return _json(metrics_of(await read_metrics(), model))

    @router.get("/samples/{model}/{version}")
    async def list_samples(model: str, version: str) -> Response:
        files = await asyncio.to_thread(samples.samples_of, registry.find(model, version))
        types = [
            mimetypes.guess_type(path.name, strict=False)[0] or "application/octet-stream"
            for path, _ in files
        ]
        entries = [
            {"name": path.name, "type": type, "size": size}
            for (path, size), type in zip(files, types, strict=True)
        ]
        if not any(path.name == EXAMPLE for path, _ in files) and (
            example := await samples.example_of(registry.find(model, version))
        ):
            entries.append(
                {"name": EXAMPLE, "type": example.content_type, "size": len(example.body)}
            )
        return _json(entries)

    @router.get("/samples/{model}/{version}/{name}")
    async def sample(model: str, version: str, name: str) -> Response:
        files = await asyncio.to_thread(samples.samples_of, registry.find(model, version))
        try:
            body = await asyncio.to_thread(
                next(path for path, _ in files if path.name == name).read_bytes
            )
        except (
            StopIteration,
            FileNotFoundError,
        ):  # There is no such sample, or the model has been unregistered.
            example = (
                await samples.example_of(registry.find(model, version)) if name == EXAMPLE else None
            )
            if example is None:
                raise ResourceNotFound(f"The model {model} brings no sample {name}.") from None
            body = example.body
        # Browsers must not show a sample as a page, because its scripts would run in this origin.
        return Response(body, media_type="application/octet-stream", headers=HEADERS)

    return router


def metrics_of(families: Families, model: str) -> list[dict[str, Any]]:
    """Return the metrics of one model, without the buckets of histograms."""
    model_samples = []
    for metric in families.collect():
        for sample in metric.samples:
            labels = dict(sample.labels)
            if not sample.name.endswith("_bucket") and any(
                labels.get(name) == model for name in MODEL_LABELS
            ):
                extra_labels = {
                    name: value
                    for name, value in labels.items()
                    if name not in (*MODEL_LABELS, "hostname", "Hostname", "Level")
                }
                value = sample.value if math.isfinite(sample.value) else str(sample.value)
                model_samples.append(
                    {
                        "name": sample.name,
                        "help": metric.documentation,
                        "labels": extra_labels,
                        "value": value,
                    }
                )
    return model_samples


@dataclass(eq=False)
class Playground(Predictions):
    """The app of predictions and explanations at `/ui/api`, behind the management guard.

    The page can call only its own address, which may not have the inference API. The management
    guard suffices, because a client that may register models may also run them.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        use_model_path(scope)
        await super().__call__(scope, receive, send)

    async def _options(self, scope: Scope, send: Send, request_id: bytes) -> None:
        check_page(scope)

    async def _build_job(self, scope: Scope, receive: Receive, request_id: bytes) -> Any:
        check_page(scope)
        return await super()._build_job(
            without_headers(scope, PAGE_CREDENTIALS), receive, request_id
        )


def _json(value: Any) -> Response:
    return Response(
        json.dumps(value, separators=(",", ":")),
        media_type="application/json",
        headers=DATA_HEADERS,
    )


class File(NamedTuple):
    """A static file, with its compressed form and its content type."""

    body: bytes
    compressed: bytes
    type: str


@lru_cache(maxsize=1)
def files() -> dict[str, File]:
    """Return the files by name; the first call reads them."""
    return {path.name: read_file(path) for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}


def read_file(path: Path) -> File:
    body = path.read_bytes()
    return File(body, gzip.compress(body), TYPES[path.suffix])
