"""`GET /`: a short index of the paths of an address, for a person with curl, and the way to the web
page for a browser.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request, Response

from tsx_runtime.http.routes import openapi
from tsx_runtime.version import __version__

SHOWN = (
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
ALL = {
    "GET /api-description": "All paths, as an OpenAPI document",
    "GET /docs": "The same in a browser",
}
PAGE = "/ui/"


def answer_index(
    request: Request,
    title: str,
    paths: Mapping[str, Mapping[str, str]],
    elsewhere: Mapping[str, str],
) -> Response:
    """`paths`: the summary of each method.

    `elsewhere`: the other addresses of the server, by their roles.
    """
    if PAGE in paths and "text/html" in request.headers.get("accept", ""):
        return Response(
            status_code=307, headers={"location": "ui/"}
        )  # relative, so that it holds behind a proxy's prefix too
    shown = {
        f"{verb} {path}": summary for path in SHOWN for verb, summary in paths.get(path, {}).items()
    }
    index = {"name": title, "version": __version__, "paths": shown | ALL}
    return Response(
        openapi.to_json(index | ({"elsewhere": elsewhere} if elsewhere else {})),
        media_type="application/json",
    )
