"""The index of an address at `GET /`: its main paths as JSON; browsers get the web page."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from tsx_runtime.http.routes import openapi
from tsx_runtime.version import __version__

MAIN_PATHS = (
    "/predictions/{model}",
    "/explanations/{model}",
    "/v2/models/{model}/infer",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/models",
    "/models",
    "/models/{model}",
    "/workflows",
    "/ping",
    "/metrics",
    "/readyz",
    "/ui/",
)
DOCUMENTATION = {
    "GET /api-description": "All paths, as an OpenAPI document",
    "GET /docs": "The same in a browser",
}
PAGE = "/ui/"


class IndexedApp(FastAPI):
    """An app that knows its paths."""

    paths: dict[str, dict[str, str]]  # summaries by path template and method
    other_addresses: dict[str, str]  # addresses of the other listeners, by their roles


def add_routes(app: IndexedApp) -> None:
    """Add the index and the OpenAPI document of an app."""

    async def describe(request: Request) -> Response:
        return Response(openapi.to_json(app.openapi()), media_type="application/json")

    async def index(request: Request) -> Response:
        return await describe(request) if request.method == "OPTIONS" else _index(app, request)

    app.add_api_route("/", index, methods=["GET", "HEAD", "OPTIONS"], include_in_schema=False)
    app.add_api_route("/api-description", describe, methods=["GET"], include_in_schema=False)


def _index(app: IndexedApp, request: Request) -> Response:
    """Return the index, or redirect a browser to the web page."""
    if PAGE in app.paths and "text/html" in request.headers.get("accept", ""):
        # A relative location is also correct if a proxy adds a prefix.
        return Response(status_code=307, headers={"location": "ui/"})
    main_paths = {
        f"{method} {path}": summary
        for path in MAIN_PATHS
        for method, summary in app.paths.get(path, {}).items()
    }
    index = {"name": app.title, "version": __version__, "paths": main_paths | DOCUMENTATION}
    if app.other_addresses:
        index["elsewhere"] = app.other_addresses
    return Response(openapi.to_json(index), media_type="application/json")
