"""The routes of plugins; a plugin's role determines their listener and guard."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request, Response

from tsx_runtime.api.headers import is_header
from tsx_runtime.api.messages import read_body
from tsx_runtime.api.urls import RESERVED_PATHS, runs_model
from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import SettingError, TsxError, Unavailable
from tsx_runtime.plugins import Endpoint, EndpointRequest, EndpointResponse, ModelFacts
from tsx_runtime.settings.schema import SECRETS, Settings

MAX_CALLS = 64  # concurrent calls of one endpoint that run in threads

logger = logging.getLogger("tsx.plugins")


class RegistryView:
    """The `ServerView` of a registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def setting(self, name: str) -> Any:
        """Return the value of a setting, unless it is a secret.

        Raises:
            KeyError: The setting is unknown or a secret.
        """
        if name in SECRETS or name not in Settings.model_fields:
            raise KeyError(name)
        return getattr(self._registry.settings, name)

    def models(self) -> list[ModelFacts]:
        return [
            ModelFacts(
                version.name,
                version.version,
                version.url,
                version.version == model.default,
                sum(worker.state is WorkerState.READY for worker in version.workers),
                version.batch_size,
                version.pending,
            )
            for model in list(self._registry.models.values())
            for version in list(model.versions.values())
        ]


def check_paths(endpoints: Iterable[Endpoint]) -> None:
    """Check the paths of all endpoints.

    Raises:
        SettingError: A path is already in use, or another endpoint with the same first segment
            has a different role.
    """
    paths: set[str] = set()
    roles: dict[str, str] = {}
    for endpoint in endpoints:
        segment = endpoint.path.split("/")[1]
        is_reserved = segment in RESERVED_PATHS and endpoint.path != "/ping"
        if is_reserved or runs_model(endpoint.path) or endpoint.path in paths:
            raise SettingError(
                f"a plugin's endpoint {endpoint.path} cannot be added: that path is already in use"
            )
        if roles.setdefault(segment, endpoint.role) != endpoint.role:
            raise SettingError(
                f"a plugin's endpoint {endpoint.path} cannot be added: endpoints below /{segment}"
                " have another role, and so another token"
            )
        paths.add(endpoint.path)


def build_router(endpoints: Iterable[Endpoint], registry: Registry, limit: int) -> APIRouter:
    router = APIRouter(tags=["plugins"])
    view = RegistryView(registry)
    for endpoint in endpoints:
        router.add_api_route(
            endpoint.path,
            _route(endpoint, view, limit),
            methods=[*endpoint.methods],
            summary=f"Of a plugin: {endpoint.path}",
            operation_id="plugin_"
            + "_".join(endpoint.path.strip("/").split("/"))
            + "_"
            + "_".join(endpoint.methods).lower(),
            response_class=Response,
        )
    return router


def _route(endpoint: Endpoint, view: RegistryView, limit: int) -> Any:
    threads = DaemonThreads(MAX_CALLS, f"calls of {endpoint.path}")

    async def route(request: Request) -> Response:
        body = await read_body(request.scope, request.receive, limit)
        headers = {name.lower(): value for name, value in request.headers.items()}
        query = {name: request.query_params.getlist(name)[0] for name in request.query_params}
        endpoint_request = EndpointRequest(request.method, request.url.path, query, headers, body)
        try:
            return _response(await _call_endpoint(endpoint, endpoint_request, view, threads))
        except Unavailable:
            raise
        except (Exception, SystemExit) as error:  # the boundary to the plugin's code
            logger.exception("the endpoint %s of a plugin failed", endpoint.path)
            raise TsxError(
                f"The endpoint {endpoint.path} failed: {type(error).__name__}; the server's log has"
                " the traceback."
            ) from error

    return route


async def _call_endpoint(
    endpoint: Endpoint,
    endpoint_request: EndpointRequest,
    view: RegistryView,
    threads: DaemonThreads,
) -> EndpointResponse:
    if inspect.iscoroutinefunction(endpoint.answer):
        response = await endpoint.answer(endpoint_request, view)
    else:
        response = await threads.call(lambda: endpoint.answer(endpoint_request, view))
    if not isinstance(response, EndpointResponse):
        raise TypeError(
            f"it answered with a {type(response).__name__}, not with an EndpointResponse"
        )
    return response


def _response(response: EndpointResponse) -> Response:
    for name, value in response.headers.items():
        # The value may be a client's, which must not add lines to the head.
        if not is_header(name.encode("latin-1"), value.encode("latin-1")):
            raise ValueError(f"it set a header that HTTP does not allow: {name!r}: {value[:100]!r}")
    if isinstance(response.body, bytes | str):
        return Response(response.body, response.status, dict(response.headers))
    body = json.dumps(response.body, indent=2) + "\n"
    return Response(body, response.status, dict(response.headers), media_type="application/json")
