"""The FastAPI app of each listener, with the routes of the roles that the listener has."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute

from tsx_runtime.api import errors
from tsx_runtime.api.access.auth import Guard, build_guards
from tsx_runtime.api.access.client_limits import (
    REFUSAL_DELAY_S,
    Caller,
    ClientLimits,
    client_limits,
    current_caller,
)
from tsx_runtime.api.access.origins import (
    check_one_host,
    cors_headers,
    is_preflight,
    with_cors_headers,
)
from tsx_runtime.api.access.tokens import Keys, build_keys
from tsx_runtime.api.access_log import LoggedResponse, access_log
from tsx_runtime.api.errors import NOT_FOUND
from tsx_runtime.api.headers import NO_CACHE, check_distinct
from tsx_runtime.api.likely_paths import LikelyPaths
from tsx_runtime.api.messages import (
    COUNTED_BYTES,
    MAX_HEADERS,
    MAX_MANAGEMENT_BODY,
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
from tsx_runtime.api.tracing import traced
from tsx_runtime.api.urls import RESERVED_PATHS, check_query, runs_model, without_empty
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.core.telemetry.time_series import TimeSeries
from tsx_runtime.core.telemetry.tracing import Tracer
from tsx_runtime.errors import BadRequest, HeadTooLarge, ResourceNotFound, TooManyRequests, TsxError
from tsx_runtime.http.asgi_lane import websockets
from tsx_runtime.http.asgi_lane.idempotency import App, Idempotency, has_key
from tsx_runtime.http.asgi_lane.jobs import JobRoutes
from tsx_runtime.http.asgi_lane.predictions import Predictions
from tsx_runtime.http.asgi_lane.workflow_predictions import WorkflowPredictions, runs_workflow
from tsx_runtime.http.connection_clock import Clock, TimedConnection, Timeouts
from tsx_runtime.http.fast_lane.heads import Heads
from tsx_runtime.http.fast_lane.lane import Lane
from tsx_runtime.http.fast_lane.response_heads import ResponseHeadCache
from tsx_runtime.http.routes import (
    debug,
    exception_handlers,
    health,
    index,
    kserve,
    management,
    openapi,
    recording,
    rollout,
    shadow,
    traffic,
)
from tsx_runtime.http.routes import plugins as plugin_routes
from tsx_runtime.http.routes import workflows as workflow_routes
from tsx_runtime.http.routes.jobs import precomputed, queue
from tsx_runtime.http.routes.plugins import check_paths
from tsx_runtime.http.turns import Turns
from tsx_runtime.http.ui import api_page
from tsx_runtime.http.ui import routes as ui
from tsx_runtime.http.ui.routes import PREDICT_PREFIX, Playground, PlaygroundJobs
from tsx_runtime.jobs.service import Jobs
from tsx_runtime.metrics import collection
from tsx_runtime.metrics.host import System
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import ROLES, Settings
from tsx_runtime.version import __version__
from tsx_runtime.workflows.manager import Workflows

if TYPE_CHECKING:
    from uvicorn.server import ServerState

# Probes and Prometheus request these paths, so they have no limit per client.
UNLIMITED_PATHS = frozenset({"/ping", "/livez", "/readyz", "/metrics", *kserve.HEALTH_PATHS})
MAX_PATH_CHARS = 8192  # longer than any path of FastAPI's routes
SEPARATE_LISTENERS = tuple((role,) for role in ROLES)


class ServerApp(FastAPI):
    """The app of one listener; predictions bypass FastAPI, which serves the other routes.

    Every response has a request id and forbids caching. Every error has the error JSON as its body.
    Each route checks its guard first.
    """

    def __init__(
        self, title: str, counts: ResponseCounts, settings: Settings, system: System | None = None
    ) -> None:
        # FastAPI's own page at /docs is off, because it loads scripts from another host.
        super().__init__(
            title=title, version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
        )
        self.counts = counts
        self.timeouts = Timeouts(
            keep_alive=settings.keep_alive_timeout,
            head=settings.header_timeout,
            body=settings.body_timeout,
            body_idle=settings.body_idle_timeout,
            write=settings.write_timeout,
        )
        # `build_apps` replaces this budget by that of the registry.
        self.bytes_in_flight = ByteBudget(settings.max_inflight_bytes)
        self.max_header_size = settings.max_header_size
        self._lane: Lane | None = None
        # Whether another server accepts the new connections. Each connection of this server then
        # ends after its next response.
        self.is_replaced = False
        self.predictions: Predictions | None = None
        self.server_timing_share = settings.server_timing_share
        self.cors = cors_headers(settings)
        self.access_log = access_log(settings)
        self.tracer: Tracer | None = None
        self.system = system or System(settings)
        self.jobs: JobRoutes | None = None  # None if there are no asynchronous requests
        self.idempotency: Idempotency | None = None
        self.workflow_predictions: WorkflowPredictions | None = None
        self.playground: Playground | None = None
        self.platform: PlatformHook | None = None
        self.clients: ClientLimits | None = None  # None if no client is limited
        self.guards: dict[str, Guard | None] = {}  # guards by the first segment of the path
        self.paths: dict[str, dict[str, str]] = {}  # summaries by path template and method
        self.other_addresses: dict[
            str, str
        ] = {}  # addresses of the other listeners, by their roles
        self.likely_paths = LikelyPaths()
        exception_handlers.add_exception_handlers(self, self.not_found)
        self.add_api_route(
            "/", self._index, methods=["GET", "HEAD", "OPTIONS"], include_in_schema=False
        )
        self.add_api_route(
            "/api-description", self._describe, methods=["GET"], include_in_schema=False
        )
        self.include_router(api_page.build_router())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("root_path"):
            _strip_root(scope)
        if scope["type"] == "websocket" and self.predictions is not None:
            await websockets.serve_websocket(
                self, self._admit, self.predictions, scope, receive, send
            )
            return
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope[COUNTED_BYTES] = counted = CountedBytes(self.bytes_in_flight)
        logged_response = (
            None
            if self.access_log is None or not self.access_log.wants()
            else LoggedResponse(self.access_log, scope, send)
        )
        try:
            await self._answer(scope, receive, logged_response or send)
        finally:
            counted.give_back()
            if logged_response is not None:
                logged_response.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.cors:
            send = with_cors_headers(send, self.cors)
        try:
            send = await self._admit(scope, send)
        except (TooManyRequests, BadRequest) as error:
            await self._refuse(scope, send, request_id_of(scope), error)
            return
        if self.cors and is_preflight(scope):
            await send_whole(send, scope, 200, NO_CACHE, request_id_of(scope), b"")
            return
        if len(scope["headers"]) > MAX_HEADERS:
            text = f"The request has {len(scope['headers'])} headers; the limit is {MAX_HEADERS}."
            await self._refuse(scope, send, request_id_of(scope), HeadTooLarge(text))
        elif self.platform is not None and self.platform.wants(raw_path(scope), scope["headers"]):
            await self.platform(scope, receive, send)
        elif self.jobs is not None and self.jobs.is_job_path(scope["path"]):
            await self.jobs(scope, receive, send)
        elif self.predictions is not None and runs_model(scope["path"]):
            predictions = (
                self.jobs
                if self.jobs is not None and self.jobs.is_async_request(scope)
                else self.predictions
            )
            await traced(
                self.tracer, self._with_idempotency(predictions, scope), scope, receive, send
            )
        elif self.workflow_predictions is not None and runs_workflow(scope["path"]):
            await traced(
                self.tracer,
                self._with_idempotency(self.workflow_predictions, scope),
                scope,
                receive,
                send,
            )
        elif self.playground is not None and scope["path"].startswith(PREDICT_PREFIX):
            await self.playground(scope, receive, send)
        else:
            await self._call_routes(scope, receive, send)

    async def _admit(self, scope: Scope, send: Send) -> Send:
        """Check a request before it is routed, and return the `send` for its response.

        Raises:
            TooManyRequests: The client has sent too many requests.
            BadRequest: `Host` is missing or repeated, or names of headers clash.
        """
        if self.clients is not None and scope.get("client"):
            send = await apply_client_limits(self.clients, scope, send)
        # On Lambda, AWS has parsed the request's head, and may have left out `Host`.
        if "aws.event" not in scope:
            check_one_host(scope["headers"], scope["http_version"])
        check_distinct(scope["headers"])
        return send

    def _with_idempotency(self, app: App, scope: Scope) -> App:
        return (
            partial(self.idempotency, app)
            if self.idempotency is not None and has_key(scope)
            else app
        )

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

    def add_routes(self, router: APIRouter) -> None:
        """Add a router; its documented paths appear in the index and in errors."""
        self.include_router(router)
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                self.paths.setdefault(route.path_format, {}).update(
                    dict.fromkeys(sorted(route.methods or ()), route.summary or "")
                )

    def lane_of(self, server_state: ServerState) -> Lane:
        """Return the lane of this listener; the first call creates it."""
        if self._lane is None:
            predictions, heads = self.predictions, None
            # A plugin may refuse a head that it has accepted before, so heads cannot be cached.
            if predictions is not None and not (predictions.guard and predictions.guard.plugins):
                heads = Heads(
                    predictions.registry,
                    predictions.guard,
                    predictions.limit,
                    self.max_header_size,
                    traced=self.tracer is not None,
                    platform=self.platform,
                    missing_route=self.missing_route,
                )
            self._lane = Lane(
                heads,
                ResponseHeadCache(
                    server_state,
                    self.cors,
                    is_confined=predictions is not None and predictions.is_confined,
                ),
                Clock(cast("Collection[TimedConnection]", server_state.connections)),
                Turns(asyncio.get_running_loop()),
                self.counts,
                self.bytes_in_flight,
                self.timeouts,
                self.max_header_size,
                0 if predictions is None else predictions.limit,
                self.clients,
                self.access_log,
                self.tracer,
                self.server_timing_share,
            )
        return self._lane

    async def _call_routes(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope)
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
            if path not in kserve.HEALTH_PATHS and (
                guard := self.guards.get(path[1:].partition("/")[0])
            ):
                guard.check(scope["headers"])
            # Only on the server's own paths: an empty parameter may have a meaning for a plugin.
            if scope["query_string"] and path[1:].partition("/")[0] in RESERVED_PATHS:
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

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, including the routes that bypass FastAPI."""
        if self.openapi_schema is None:
            document = super().openapi()
            openapi.replace_validation_errors(document)
            if self.predictions is not None:
                openapi.add_predictions(document)
            if self.jobs is not None:
                document["paths"] |= openapi.job_path()
        return super().openapi()

    async def _index(self, request: Request) -> Response:
        if request.method == "OPTIONS":
            return await self._describe(request)
        return index.answer_index(request, self.title, self.paths, self.other_addresses)

    async def _describe(self, request: Request) -> Response:
        return Response(openapi.to_json(self.openapi()), media_type="application/json")


def _strip_root(scope: Scope) -> None:
    """Remove the prefix (`root_path`) from the path, because guards and routes do not have it."""
    root, path = scope["root_path"].rstrip("/"), scope["path"]
    if path.startswith(f"{root}/"):
        scope["path"] = path[len(root) :]
    scope["root_path"] = ""


def build_apps(
    registry: Registry,
    settings: Settings,
    listeners: Sequence[Collection[str]] = SEPARATE_LISTENERS,
    keys: Keys | None = None,
    workflows: Workflows | None = None,
    series: TimeSeries | None = None,
    addresses: Mapping[str, str] | None = None,
    jobs: Jobs | None = None,
) -> list[ServerApp]:
    """Build one app for each listener, with the routes of the roles that share its address.

    Args:
        registry: The models.
        settings: The settings of the server.
        listeners: The roles of each listener.
        keys: The tokens; None reads them from the settings.
        workflows: The workflows; None means that there are none yet.
        series: The data of the web page's charts.
        addresses: The actual address of each role, which overrides that of the settings.
        jobs: The job service; None means that there are no asynchronous requests.
    """
    workflows = workflows or Workflows(registry)
    keys = keys or build_keys(settings)
    series = series or TimeSeries(registry.models.values)
    counts, system = ResponseCounts(), System(settings)
    apps = [
        _build_app(
            roles,
            registry,
            workflows,
            settings,
            keys,
            counts,
            system,
            series,
            addresses or {},
            jobs,
        )
        for roles in listeners
    ]
    addresses_by_role = {role: getattr(settings, f"{role}_address") for role in ROLES} | dict(
        addresses or {}
    )
    _share_paths(
        {
            " and ".join(role for role in ROLES if role in roles): app
            for roles, app in zip(listeners, apps, strict=True)
        },
        addresses_by_role,
    )
    return apps


def _build_app(
    roles: Collection[str],
    registry: Registry,
    workflows: Workflows,
    settings: Settings,
    keys: Keys,
    counts: ResponseCounts,
    system: System,
    series: TimeSeries,
    addresses: Mapping[str, str],
    jobs: Jobs | None,
) -> ServerApp:
    plugins = registry.plugins
    guards = build_guards(settings, keys, plugins.authentication.values())
    app = ServerApp(
        f"tsx {', '.join(role for role in ROLES if role in roles)}", counts, settings, system
    )
    app.tracer = registry.tracer
    app.bytes_in_flight = registry.bytes_in_flight
    app.clients = client_limits(
        settings,
        is_local=all(
            parse_address(getattr(settings, f"{role}_address")).is_local for role in roles
        ),
    )
    limit = settings.max_request_size
    max_management_body = min(limit, MAX_MANAGEMENT_BODY)
    max_job_size = settings.max_job_size or limit
    is_confined = "management" in roles  # See `answer_headers`.
    if jobs is not None and ("inference" in roles or "management" in roles):
        jobs_guard = guards.management if "inference" not in roles else guards.inference
        if "management" in roles:
            app.add_routes(queue.build_router(jobs, guards.management))
            jobs_guard = jobs_guard and jobs_guard._replace(second_key=keys.management)
        app.jobs = JobRoutes(jobs, registry, max_job_size, jobs_guard, counts, is_confined)
        app.paths |= {
            path: {method.upper(): operation["summary"] for method, operation in item.items()}
            for path, item in openapi.job_path().items()
        }
    if "inference" in roles:
        timing_share = settings.server_timing_share
        app.predictions = Predictions(
            registry,
            limit,
            guards.inference,
            counts,
            openapi.describe_predictions,
            timing_share,
            is_confined,
        )
        app.workflow_predictions = WorkflowPredictions(
            workflows, limit, guards.inference, counts, is_confined
        )
        keyed_runs = None if jobs is None else jobs.keyed_runs
        credentials = registry.hidden_headers.exposed_credential_headers
        app.idempotency = Idempotency(
            keyed_runs, limit, max_job_size, guards.inference, counts, credentials, is_confined
        )
        if jobs is not None:
            app.add_routes(precomputed.build_router(jobs, is_confined=is_confined))
            app.guards["predictions"] = guards.inference
        path_items = openapi.prediction_paths() | openapi.openai_paths() | openapi.workflow_path()
        app.paths |= {
            path: {method.upper(): operation["summary"] for method, operation in item.items()}
            for path, item in path_items.items()
        }
    if "management" in roles:
        if jobs is None:
            app.add_routes(queue.build_closed_router())
        # This router comes first, because others would match its path segments as a version.
        app.add_routes(traffic.build_router(registry, max_management_body))
        app.add_routes(rollout.build_router(registry, max_management_body))
        app.add_routes(recording.build_router(registry, max_management_body))
        app.add_routes(shadow.build_router(registry, max_management_body))
        app.add_routes(management.build_router(registry, max_management_body))
        app.guards["models"] = guards.management
        app.add_routes(debug.build_router(registry))
        app.guards["debug"] = guards.management
        if keys.api is not None:
            app.add_routes(management.build_token_router(keys))
            app.guards["token"] = guards.token
        app.add_routes(workflow_routes.build_router(workflows, max_management_body))
        app.guards["workflows"] = guards.management
        playground_jobs = (
            PlaygroundJobs(jobs, registry, max_job_size, guards.management, counts, is_confined)
            if jobs is not None
            else None
        )
        app.playground = Playground(
            registry,
            limit,
            guards.management,
            counts,
            openapi.describe_predictions,
            is_confined=is_confined,
            job_routes=playground_jobs,
        )
        read_metrics = collection.reader(registry, counts, system, jobs)
        app.add_routes(
            ui.build_router(registry, series, read_metrics, guards.management, addresses)
        )
        app.paths["/ui/"] = {"GET": "The web page"}
        app.guards["ui"] = ui.page_guard(guards.management)
    if "metrics" in roles:
        app.add_routes(collection.build_router(registry, counts, system, jobs))
        app.guards["metrics"] = guards.metrics
    check_paths(plugins.endpoints.values())
    for role, guard in (("inference", guards.inference), ("management", guards.management)):
        endpoints = [
            endpoint
            for endpoint in plugins.endpoints.values()
            if endpoint.role == role and role in roles
        ]
        app.add_routes(plugin_routes.build_router(endpoints, registry, limit))
        app.guards.update(
            {
                segment: guard
                for endpoint in endpoints
                if (segment := endpoint.path.split("/")[1]) != "ping"
            }
        )
    app.add_routes(health.build_router(registry, roles))
    app.add_routes(kserve.build_router(registry, roles))
    app.guards["v1"] = guards.inference if "inference" in roles else guards.management
    app.guards["v2"] = guards.inference
    return app


def _share_paths(apps: Mapping[str, ServerApp], addresses: Mapping[str, str]) -> None:
    """Set the paths and addresses of the other listeners, for an app's errors and index.

    The keys of `apps` are roles. Addresses are set only if no other machine can connect.
    """
    is_local = all(parse_address(address).is_local for address in addresses.values())
    for app in apps.values():
        other_apps = {roles: other_app for roles, other_app in apps.items() if other_app is not app}
        if is_local:
            app.other_addresses = {
                roles: addresses[roles.partition(" ")[0]] for roles in other_apps
            }
        labels = {
            roles: f"the {roles} address{f', {app.other_addresses[roles]}' if is_local else ''}"
            for roles in other_apps
        }
        app.likely_paths = LikelyPaths(
            app.paths, {labels[roles]: other_app.paths for roles, other_app in other_apps.items()}
        )


async def apply_client_limits(limits: ClientLimits, scope: Scope, send: Send) -> Send:
    """Count a request, and return a `send` that delays the response to a wrong token.

    Raises:
        TooManyRequests: The client has sent too many requests; this is raised with a delay.
    """
    caller = Caller(limits, limits.caller(scope["client"][0], scope["headers"]))
    current_caller.set(caller)  # set only in the context of the request's task
    if scope["path"] not in UNLIMITED_PATHS:
        try:
            limits.count_request(caller.client)
        except TooManyRequests:
            await asyncio.sleep(REFUSAL_DELAY_S)
            raise

    async def delayed_send(message: Message) -> None:
        if caller.delay_s:
            await asyncio.sleep(caller.delay_s)
            caller.delay_s = 0.0
        await send(message)

    return delayed_send
