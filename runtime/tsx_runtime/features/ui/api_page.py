"""The page `/docs`: Swagger UI for the paths of an address, without files from other hosts."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request, Response

from tsx_runtime.features.ui import routes as ui
from tsx_runtime.features.ui.routes import FOLDER, HEADERS, File, answer_file, read_file

PAGE = "docs.html"
PAGE_FILES = (PAGE, "docs.js", "icon.svg")
SWAGGER_FILES = ("swagger-ui.css", "swagger-ui-bundle.js")
# Swagger UI sets innerHTML and inline styles, so the page needs a weaker policy.
POLICY = ui.POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'").partition(
    "; require-trusted-types-for"
)[0]


def build_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def page(request: Request) -> Response:
        if str(request.scope.get("raw_path", b""), "latin-1").endswith("/"):
            # The page's links to its files are relative, and work only without the slash.
            return Response(status_code=308, headers={"location": "../docs"})
        return await file(PAGE, request)

    async def file(name: str, request: Request) -> Response:
        page_files = await asyncio.to_thread(
            _files
        )  # The first call compresses the files, which takes a moment.
        return answer_file(
            page_files.get(name), request, HEADERS | {"content-security-policy": POLICY}
        )

    router.add_api_route("/docs", page, methods=["GET", "HEAD"])
    router.add_api_route("/docs/{name}", file, methods=["GET", "HEAD"])
    return router


@lru_cache(maxsize=1)
def _files() -> dict[str, File]:
    swagger = Path(str(files("fastapi_offline"))) / "static"
    return {
        path.name: read_file(path)
        for path in (
            *(FOLDER / name for name in PAGE_FILES),
            *(swagger / name for name in SWAGGER_FILES),
        )
    }
