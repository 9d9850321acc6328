"""Calls of the management API of a server that a test runs."""

from __future__ import annotations

from typing import Any

import httpx

from tests.runtime.conftest import RunningServer


def post_model(
    server: RunningServer, url: str = "talker.mar", **parameters: object
) -> httpx.Response:
    """Register a model."""
    return server.management.post("/models", params={"url": url, **parameters})


def put_model(server: RunningServer, model: str = "talker", **parameters: object) -> httpx.Response:
    """Change the workers or limits of a model, or of `MODEL/VERSION`."""
    return server.management.put(f"/models/{model}", params=parameters)


def describe(server: RunningServer, model: str = "talker", **parameters: object) -> dict[str, Any]:
    """Return the description of the default version of a model, or of `MODEL/VERSION`."""
    (version,) = server.management.get(f"/models/{model}", params=parameters).json()
    return dict(version)
