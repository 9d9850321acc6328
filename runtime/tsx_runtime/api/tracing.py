"""The name and attributes of an HTTP request's span in both lanes."""

from __future__ import annotations

from typing import Any

from tsx_runtime.api import openai
from tsx_runtime.api.headers import Pair
from tsx_runtime.core.telemetry.tracing import OpenSpan

_ROUTES = {
    "predictions": "/predictions/{model}",
    "explanations": "/explanations/{model}",
    "wfpredict": "/wfpredict/{workflow}",
}
_ROUTES_BY_VERB = {
    "invoke": "/models/{model}/invoke",
    "infer": "/v2/models/{model}/infer",
    "explain": "/v2/models/{model}/explain",
}


def route_of(path: str) -> str:
    """Return a path without model names and ids, because span names should be few."""
    if path in openai.PATHS:
        return path
    segments = path.rstrip("/").split("/")
    first, last = segments[1] if len(segments) > 1 else "", segments[-1]
    if first in _ROUTES:
        return _ROUTES[first]
    if first == "v1":
        return f"/v1/models/{{model}}:{'explain' if path.endswith(':explain') else 'predict'}"
    if first in ("v2", "models") and last in _ROUTES_BY_VERB:
        return _ROUTES_BY_VERB[last]
    return "/invocations" if first == "invocations" else "/{model}/predict"


def describe(
    span: OpenSpan,
    method: str,
    path: str,
    scheme: str,
    version: str,
    client: Any,
    headers: list[Pair],
) -> None:
    """Set a span's attributes by OpenTelemetry's names; `client` is (host, port) or None."""
    route = route_of(path)
    span.name = f"{method} {route}"
    span.attributes |= {
        "http.request.method": method,
        "http.route": route,
        "url.path": path,
        "url.scheme": scheme,
        "network.protocol.version": version,
    }
    if client:
        span.attributes |= {"client.address": client[0], "client.port": client[1]}
    agent = next((value for name, value in headers if name == b"user-agent"), None)
    if agent is not None:
        span.attributes["user_agent.original"] = agent.decode("latin-1")
