"""The FastAPI app of a listener, which passes each request to the routes of its roles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from fastapi import APIRouter
from fastapi.routing import APIRoute

from tsx_runtime.api import errors
from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access_log import LoggedResponse, access_log
from tsx_runtime.api.errors import NOT_FOUND
from tsx_runtime.api.headers import NO_CACHE
from tsx_runtime.api.likely_paths import LikelyPaths
from tsx_runtime.api.messages import (
    COUNTED_BYTES,
    MAX_HEADERS,
    REQUEST_ID,
    App,
    ClientGone,
    CountedBytes,
    Message,
    PlatformHook,
    Receive,
    Scope,
    Send,
    raw_path,
    request_id_of,
    send_whole,
)
from tsx_runtime.api.urls import HEALTH_PATHS, RESERVED_PATHS, check_query, without_empty
from tsx_runtime.errors import BadRequest, HeadTooLarge, ResourceNotFound, TooManyRequests, TsxError
from tsx_runtime.http.admission import HttpAdmission
from tsx_runtime.http.asgi_lane import websockets
from tsx_runtime.http.asgi_lane.predictions import Predictions
from tsx_runtime.http.context import ServerContext
from tsx_runtime.http.fast_lane.lane import Lane
from tsx_runtime.http.routes.index import IndexedApp
from tsx_runtime.version import __version__

if TYPE_CHECKING:
    from uvicorn.server import ServerState

MAX_PATH_CHARS = 8192  # longer than any path of FastAPI's routes

RequestFilter: TypeAlias = Callable[[Scope], bool]  # tells whether an app takes a request


class ServerApp(IndexedApp):
    """The app of one listener; predictions bypass FastAPI, which serves the other routes.

    Every response has a request id and forbids caching. Every error has the error JSON as its body.
    Each route checks its guard first.
    """

    def __init__(self, context: ServerContext, roles: Collection[str] = ()) -> None:
        # FastAPI's own page at /docs is off, because it loads scripts from another host.
        super().__init__(
            title=f"tsx {', '.join(roles)}",
            version=__version__,
            openapi_url=None,  # `index.add_routes` has this path.
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )
        self.context = context
        self.roles = roles
        self.counts = context.counts
        self.timeouts = context.timeouts
        self.admission = HttpAdmission(context.settings, roles)
        self.access_log = access_log(context.settings)
        # Returns the lane of this listener, which its first connection creates.
        self.lane_of: Callable[[ServerState], Lane]
        # Whether another server accepts the new connections. Each connection of this server then
        # ends after its next response.
        self.is_replaced = False
        self.predictions: Predictions | None = None
        # The apps of paths that bypass FastAPI; the first one that takes a request answers it.
        # The apps in `model_apps` run models. For each of their requests, the functions in
        # `wrappers` wrap the app; the last wrapper is the outermost.
        self.apps: list[tuple[RequestFilter, App]] = []
        self.model_apps: list[tuple[RequestFilter, App]] = []
        self.wrappers: list[Callable[[App, Scope], App]] = []
        self.platform: PlatformHook | None = None
        # guards by the first segment of the path, or by the path
        self.guards: dict[str, Guard | None] = {}
        self.paths, self.path_items, self.other_addresses = {}, {}, {}
        self.likely_paths = LikelyPaths()

    @property
    def is_confined(self) -> bool:
        """Whether responses of models must not act in a browser; see `answer_headers`."""
        return "management" in self.roles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("root_path"):
            _strip_root(scope)
        if scope["type"] == "websocket" and self.predictions is not None:
            await websockets.serve_websocket(
                self, self.admission, self.predictions, self.runs_model, scope, receive, send
            )
            return
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope[COUNTED_BYTES] = counted = CountedBytes(self.context.bytes_in_flight)
        logged_response = (
            LoggedResponse(self.access_log, scope, send)
            if self.access_log and self.access_log.wants()
            else None
        )
        try:
            await self._answer(scope, receive, logged_response or send)
        finally:
            counted.give_back()
            if logged_response:
                logged_response.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = self.admission.with_cors(send)
        try:
            send = await self.admission(scope, send)
        except (TooManyRequests, BadRequest) as error:
            await self._refuse(scope, send, request_id_of(scope), error)
            return
        if self.admission.is_preflight(scope):
            await send_whole(send, scope, 200, NO_CACHE, request_id_of(scope), b"")
            return
        if len(scope["headers"]) > MAX_HEADERS:
            text = f"The request has {len(scope['headers'])} headers; the limit is {MAX_HEADERS}."
            await self._refuse(scope, send, request_id_of(scope), HeadTooLarge(text))
        elif self.platform and self.platform.wants(raw_path(scope), scope["headers"]):
            await self.platform(scope, receive, send)
        elif app := self.model_app(scope):
            await app(scope, receive, send)
        else:
            await (_find(self.apps, scope) or self._call_routes)(scope, receive, send)

    def model_app(self, scope: Scope) -> App | None:
        """Return the app that runs the model of a request, in its wrappers, or None."""
        if app := _find(self.model_apps, scope):
            for wrap in self.wrappers:
                app = wrap(app, scope)
        return app

    def runs_model(self, scope: Scope) -> bool:
        """Tell whether a request runs a model or a workflow."""
        return _find(self.model_apps, scope) is not None

    def missing_route(self, path: str) -> ResourceNotFound | None:
        """Return the error if no route begins with the path's first segment, else None."""
        segment = path[1:].partition("/")[0]
        return (
            None
            if not segment or segment in RESERVED_PATHS or segment in self.guards
            else self.not_found(path)
        )

    def not_found(self, path: str) -> ResourceNotFound:
        """Return the error of an unknown path; its message suggests similar paths."""
        return self.likely_paths.not_found(path)

    def add_routes(
        self, router: APIRouter, guards: Mapping[str, Guard | None] = MappingProxyType({})
    ) -> None:
        """Add a router; its documented paths appear in the index and in errors.

        `guards` has the guards of its paths, by their first segments or by whole paths.
        """
        self.include_router(router)
        self.guards.update(guards)
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                self.paths.setdefault(route.path_format, {}).update(
                    dict.fromkeys(sorted(route.methods or ()), route.summary or "")
                )

    async def _call_routes(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REQUEST_ID] = request_id = request_id_of(scope)
        has_begun = has_ended = False

        async def send_response(message: Message) -> None:
            nonlocal has_begun, has_ended
            if message["type"] == "http.response.start":
                has_begun = True
                self.counts.add(message["status"])
                message["headers"] = [*message["headers"], (b"x-request-id", request_id), *NO_CACHE]
            else:
                has_ended = not message.get("more_body", False)
            await send(message)

        try:
            check_query(scope["query_string"])
            path: str = scope["path"]
            # Every route would match its pattern against the whole path, which takes long.
            if len(path) > MAX_PATH_CHARS:
                raise ResourceNotFound(NOT_FOUND)
            if path.endswith("/"):  # `/models/` is the same as `/models`.
                scope["path"] = path = path.rstrip("/") or "/"
            if not_found := self.missing_route(path):
                raise not_found
            segment = path[1:].partition("/")[0]
            if path not in HEALTH_PATHS and (
                guard := self.guards.get(path[1:], self.guards.get(segment))
            ):
                guard.check(scope["headers"])
            # Only on the server's own paths: an empty parameter may have a meaning for a plugin.
            if scope["query_string"] and segment in RESERVED_PATHS:
                # The original scope stays unchanged, because the access log shows its query string.
                scope = {**scope, "query_string": without_empty(scope["query_string"])}
            await super().__call__(scope, receive, send_response)
        except ClientGone:
            return
        except Exception as error:  # the boundary of a request
            refusal = errors.to_tsx_error(error, request_id)
            if not has_begun:
                await self._refuse(scope, send, request_id, refusal)
            elif not has_ended:
                # The client has a part of the response, so only closing the connection helps.
                raise

    async def _refuse(self, scope: Scope, send: Send, request_id: bytes, error: TsxError) -> None:
        status, headers, body = errors.error_response(error, scope["path"])
        self.counts.add(status)
        await send_whole(send, scope, status, headers, request_id, body)


def _strip_root(scope: Scope) -> None:
    """Remove the prefix (`root_path`) from the path, because guards and routes do not have it."""
    root, path = scope["root_path"].rstrip("/"), scope["path"]
    if path.startswith(f"{root}/"):
        scope["path"] = path[len(root) :]
    scope["root_path"] = ""


def _find(apps: Iterable[tuple[RequestFilter, App]], scope: Scope) -> App | None:
    return next((app for takes, app in apps if takes(scope)), None)
