"""The index of an address at `GET /`: its main paths as JSON; browsers get the web page."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request, Response

from tsx_runtime.api.access.auth import Guard
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.http.routes import model_paths, openapi
from tsx_runtime.version import __version__

MAIN_PATHS = (
    "/predictions/{model}",
    "/explanations/{model}",
    "/v2/models/{model}/infer",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/models",
    "/mcp",
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
    """An app that describes its paths."""

    paths: dict[str, dict[str, str]]  # summaries by path template and method
    path_items: dict[str, dict[str, Any]]  # OpenAPI path items of the apps that bypass FastAPI
    other_addresses: dict[str, str]  # addresses of the other listeners, by their roles

    def document(self, path_items: dict[str, dict[str, Any]]) -> None:
        """Add the OpenAPI path items of an app that bypasses FastAPI to the documents."""
        self.path_items |= path_items
        for path, item in path_items.items():
            self.paths[path] = {
                method.upper(): operation["summary"] for method, operation in item.items()
            }

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, including the routes that bypass FastAPI."""
        if self.openapi_schema is None:
            document = super().openapi()
            openapi.replace_validation_errors(document)
            document["paths"] = self.path_items | document["paths"]
        return super().openapi()


def add_routes(
    app: IndexedApp, registry: Registry, guard: Guard | None, roles: Collection[str]
) -> None:
    """Add the index and the OpenAPI document of an app.

    The document has the models of `registry` if `guard` lets the request call them.
    """
    if "inference" in roles:
        app.document(openapi.prediction_paths())

    async def describe(request: Request) -> Response:
        document = app.openapi()
        if "inference" in roles:
            versions = model_paths.visible_versions(registry, guard, request.scope["headers"])
            document = model_paths.add_models(document, versions)
        return Response(openapi.to_json(document), media_type="application/json")

    async def index(request: Request) -> Response:
        return await describe(request) if request.method == "OPTIONS" else _index(app, request)

    app.add_api_route("/", index, methods=["GET", "HEAD", "OPTIONS"], include_in_schema=False)
    for path in ("/api-description", "/openapi.json"):
        app.add_api_route(path, describe, methods=["GET", "HEAD"], include_in_schema=False)


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
