"""The index of an address at `GET /`: its main paths as JSON; browsers get the web page."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request, Response

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


def answer_index(
    request: Request,
    title: str,
    paths: Mapping[str, Mapping[str, str]],
    other_addresses: Mapping[str, str],
) -> Response:
    """Return the index, or redirect a browser to the web page.

    Args:
        request: The request.
        title: The name of the app.
        paths: The summaries of all routes, by path and method.
        other_addresses: The server's other addresses, by their roles.
    """
    if PAGE in paths and "text/html" in request.headers.get("accept", ""):
        # A relative location is also correct if a proxy adds a prefix.
        return Response(status_code=307, headers={"location": "ui/"})
    main_paths = {
        f"{method} {path}": summary
        for path in MAIN_PATHS
        for method, summary in paths.get(path, {}).items()
    }
    index = {"name": title, "version": __version__, "paths": main_paths | DOCUMENTATION}
    return Response(
        openapi.to_json(index | ({"elsewhere": other_addresses} if other_addresses else {})),
        media_type="application/json",
    )
