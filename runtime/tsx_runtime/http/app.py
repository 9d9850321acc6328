"""The FastAPI apps of the three listeners, each with the routes of its roles."""

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
    calling,
    client_limits,
)
from tsx_runtime.api.access.origins import adding, check_one_host, cors_headers, is_preflight
from tsx_runtime.api.access.tokens import Keys, build_keys
from tsx_runtime.api.access_log import LoggedResponse, access_log
from tsx_runtime.api.errors import NOT_FOUND
from tsx_runtime.api.headers import NO_CACHE, check_distinct
from tsx_runtime.api.likely_paths import LikelyPaths
from tsx_runtime.api.messages import (
    COUNTED,
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
from tsx_runtime.http.routes import plugins as plugged
from tsx_runtime.http.routes import workflows as workflow_routes
from tsx_runtime.http.routes.jobs import precomputed, queue
from tsx_runtime.http.routes.plugins import check_paths
from tsx_runtime.http.turns import Turns
from tsx_runtime.http.ui import api_page
from tsx_runtime.http.ui import routes as ui
from tsx_runtime.http.ui.routes import PREDICT, Playground, PlaygroundJobs
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

UNLIMITED = frozenset(
    {"/ping", "/livez", "/readyz", "/metrics", *kserve.HEALTH}
)  # what probes and Prometheus ask
LONGEST_PATH = 8192  # characters; no route of the framework has so long a one
SEPARATE = tuple((role,) for role in ROLES)


class ServerApp(FastAPI):
    """FastAPI for all but predictions, which go straight to their endpoint.

    Every answer gets a request id and forbids caching; every error is the error JSON; each route is
    behind its guard.
    """

    def __init__(
        self, title: str, counts: ResponseCounts, settings: Settings, system: System | None = None
    ) -> None:
        # no /docs: FastAPI's page loads its scripts from another host
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
        self.bytes_in_flight = ByteBudget(
            settings.max_inflight_bytes
        )  # the registry's, where there is one
        self.max_header_size = settings.max_header_size
        self._lane: Lane | None = None
        # another server accepts the connections from now on: those that are here end with their
        # next answer
        self.leaving = False
        self.predictions: Predictions | None = None
        self.server_timing_share = settings.server_timing_share
        self.cors = cors_headers(settings)
        self.access_log = access_log(settings)
        self.tracer: Tracer | None = None
        self.system = system or System(settings)
        self.jobs: JobRoutes | None = None  # None: every client waits for its answer
        self.idempotency: Idempotency | None = None
        self.workflow_predictions: WorkflowPredictions | None = None
        self.playground: Playground | None = None
        self.platform: PlatformHook | None = None
        self.clients: ClientLimits | None = None  # None: no client is limited
        self.guards: dict[str, Guard | None] = {}  # by the first segment of the path
        self.paths: dict[str, dict[str, str]] = {}  # as templates: the summary of each method
        self.elsewhere: dict[str, str] = {}  # the server's other addresses, by their roles
        self.likely_paths = LikelyPaths()
        exception_handlers.install(self, self.not_found)
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
            await websockets.converse(self, self._admit, self.predictions, scope, receive, send)
            return
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope[COUNTED] = counted = CountedBytes(self.bytes_in_flight)
        logged = (
            None
            if self.access_log is None or not self.access_log.wants()
            else LoggedResponse(self.access_log, scope, send)
        )
        try:
            await self._answer(scope, receive, logged or send)
        finally:
            counted.give_back()
            if logged is not None:
                logged.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.cors:
            send = adding(send, self.cors)
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
        elif self.jobs is not None and self.jobs.shows(scope["path"]):
            await self.jobs(scope, receive, send)
        elif self.predictions is not None and runs_model(scope["path"]):
            predictions = (
                self.jobs
                if self.jobs is not None and self.jobs.accepts(scope)
                else self.predictions
            )
            await traced(self.tracer, self._keyed(predictions, scope), scope, receive, send)
        elif self.workflow_predictions is not None and runs_workflow(scope["path"]):
            await traced(
                self.tracer, self._keyed(self.workflow_predictions, scope), scope, receive, send
            )
        elif self.playground is not None and scope["path"].startswith(PREDICT):
            await self.playground(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    async def _admit(self, scope: Scope, send: Send) -> Send:
        """The `send` of the answer. Raises TooManyRequests and BadRequest."""
        if self.clients is not None and scope.get("client"):
            send = await limited(self.clients, scope, send)
        if "aws.event" not in scope:  # on Lambda a service has read the request's head
            check_one_host(scope["headers"], scope["http_version"])
        check_distinct(scope["headers"])
        return send

    def _keyed(self, app: App, scope: Scope) -> App:
        return (
            partial(self.idempotency, app)
            if self.idempotency is not None and has_key(scope)
            else app
        )

    def missing(self, path: str) -> ResourceNotFound | None:
        """None where there may be routes below the path's first segment; where there are none,
        nothing but 404 can be the answer.
        """
        first = path[1:].partition("/")[0]
        return (
            None
            if not first or first in RESERVED_PATHS or first in self.guards
            else self.not_found(path)
        )

    def not_found(self, path: str) -> ResourceNotFound:
        return self.likely_paths.not_found(path)

    def add_routes(self, router: APIRouter) -> None:
        self.include_router(router)
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                self.paths.setdefault(route.path_format, {}).update(
                    dict.fromkeys(sorted(route.methods or ()), route.summary or "")
                )

    def lane_of(self, server_state: ServerState) -> Lane:
        """Return the lane of this listener, which the first connection makes."""
        if self._lane is None:
            predictions, heads = self.predictions, None
            # Plugins may decide otherwise about the same head the next time.
            if predictions is not None and not (predictions.guard and predictions.guard.plugins):
                heads = Heads(
                    predictions.registry,
                    predictions.guard,
                    predictions.limit,
                    self.max_header_size,
                    traced=self.tracer is not None,
                    platform=self.platform,
                    missing=self.missing,
                )
            self._lane = Lane(
                heads,
                ResponseHeadCache(
                    server_state,
                    self.cors,
                    confined=predictions is not None and predictions.confined,
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

    async def _rest(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope)
        begun = ended = False

        async def answer(message: Message) -> None:
            nonlocal begun, ended
            if message["type"] == "http.response.start":
                begun = True
                self.counts.add(message["status"])
                message["headers"] = [*message["headers"], (b"x-request-id", request_id), *NO_CACHE]
            else:
                ended = not message.get("more_body", False)
            await send(message)

        try:
            check_query(scope["query_string"])
            path: str = scope["path"]
            if len(path) > LONGEST_PATH:  # each route would be tried on all of it
                raise ResourceNotFound(NOT_FOUND)
            if path.endswith("/"):  # `/models/` is `/models`
                scope["path"] = path = path.rstrip("/") or "/"
            if missing := self.missing(path):
                raise missing
            if path not in kserve.HEALTH and (guard := self.guards.get(path[1:].partition("/")[0])):
                guard.check(scope["headers"])
            if (
                scope["query_string"] and path[1:].partition("/")[0] in RESERVED_PATHS
            ):  # a plugin's own may mean an empty one
                scope = {
                    **scope,
                    "query_string": without_empty(scope["query_string"]),
                }  # a copy: the access log shows what was sent
            await super().__call__(scope, receive, answer)
        except ClientGone:
            return
        except TsxError as error:
            await self._refuse(scope, send, request_id, error)
        except Exception as error:  # the boundary of a request
            refusal = errors.unexpected(error, request_id)
            if not begun:
                await self._refuse(scope, send, request_id, refusal)
            elif not ended:
                raise  # half an answer is out: only closing the connection tells the client

    async def _refuse(self, scope: Scope, send: Send, request_id: bytes, error: TsxError) -> None:
        status, headers, body = errors.fault(error, scope["path"])
        self.counts.add(status)
        await send_whole(send, scope, status, headers, request_id, body)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            openapi.correct(document)
            if self.predictions is not None:
                openapi.add_predictions(document)
            if self.jobs is not None:
                document["paths"] |= openapi.job_path()
        return super().openapi()

    async def _index(self, request: Request) -> Response:
        if request.method == "OPTIONS":
            return await self._describe(request)
        return index.answer_index(request, self.title, self.paths, self.elsewhere)

    async def _describe(self, request: Request) -> Response:
        return Response(openapi.to_json(self.openapi()), media_type="application/json")


def _strip_root(scope: Scope) -> None:
    """Behind a prefix (`root_path`), guards and routes both go by the path without it."""
    root, path = scope["root_path"].rstrip("/"), scope["path"]
    if path.startswith(f"{root}/"):
        scope["path"] = path[len(root) :]
    scope["root_path"] = ""


def build_apps(
    registry: Registry,
    settings: Settings,
    listeners: Sequence[Collection[str]] = SEPARATE,
    keys: Keys | None = None,
    workflows: Workflows | None = None,
    series: TimeSeries | None = None,
    addresses: Mapping[str, str] | None = None,
    jobs: Jobs | None = None,
) -> list[ServerApp]:
    """One app a listener, each with the routes of the roles that share its address.

    `series` is what the web page's charts show, `addresses` where each role really answers; the
    settings' own if not given. Without `jobs`, every client waits for its answer.
    """
    workflows, keys, series = (
        workflows or Workflows(registry),
        keys or build_keys(settings),
        series or TimeSeries(registry.models.values),
    )
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
    configured = {role: getattr(settings, f"{role}_address") for role in ROLES} | dict(
        addresses or {}
    )
    _introduce(
        {
            " and ".join(role for role in ROLES if role in roles): app
            for roles, app in zip(listeners, apps, strict=True)
        },
        configured,
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
    most = min(limit, MAX_MANAGEMENT_BODY)
    largest = settings.max_job_size or limit
    confined = "management" in roles  # of what models answer
    if jobs is not None and ("inference" in roles or "management" in roles):
        either = guards.management if "inference" not in roles else guards.inference
        if "management" in roles:
            app.add_routes(queue.build_router(jobs, guards.management))
            either = either and either._replace(also=keys.management)
        app.jobs = JobRoutes(jobs, registry, largest, either, counts, confined)
        app.paths |= {
            path: {verb.upper(): each["summary"] for verb, each in item.items()}
            for path, item in openapi.job_path().items()
        }
    if "inference" in roles:
        share = settings.server_timing_share
        app.predictions = Predictions(
            registry, limit, guards.inference, counts, openapi.describe_predictions, share, confined
        )
        app.workflow_predictions = WorkflowPredictions(
            workflows, limit, guards.inference, counts, confined
        )
        runs, credentials = (
            None if jobs is None else jobs.keyed_runs,
            registry.hidden_headers.seen_credentials,
        )
        app.idempotency = Idempotency(
            runs, limit, largest, guards.inference, counts, credentials, confined
        )
        if jobs is not None:
            app.add_routes(precomputed.build_router(jobs, confined=confined))
            app.guards["predictions"] = guards.inference
        described = openapi.prediction_paths() | openapi.openai_paths() | openapi.workflow_path()
        app.paths |= {
            path: {method.upper(): each["summary"] for method, each in item.items()}
            for path, item in described.items()
        }
    if "management" in roles:
        if jobs is None:
            app.add_routes(queue.build_closed_router())
        app.add_routes(
            traffic.build_router(registry, most)
        )  # before those that take any word for a version
        app.add_routes(rollout.build_router(registry, most))
        app.add_routes(recording.build_router(registry, most))
        app.add_routes(shadow.build_router(registry, most))
        app.add_routes(management.build_router(registry, most))
        app.guards["models"] = guards.management
        app.add_routes(debug.build_router(registry))
        app.guards["debug"] = guards.management
        if keys.api is not None:
            app.add_routes(management.build_token_router(keys))
            app.guards["token"] = guards.token
        app.add_routes(workflow_routes.build_router(workflows, most))
        app.guards["workflows"] = guards.management
        later = (
            PlaygroundJobs(jobs, registry, largest, guards.management, counts, confined)
            if jobs is not None
            else None
        )
        app.playground = Playground(
            registry,
            limit,
            guards.management,
            counts,
            openapi.describe_predictions,
            confined=confined,
            later=later,
        )
        read_metrics = collection.reader(registry, counts, system, jobs)
        app.add_routes(
            ui.build_router(registry, series, read_metrics, guards.management, addresses)
        )
        app.paths["/ui/"] = {"GET": "The web page"}
        app.guards["ui"] = ui.shell_guard(guards.management)
    if "metrics" in roles:
        app.add_routes(collection.build_router(registry, counts, system, jobs))
        app.guards["metrics"] = guards.metrics
    check_paths(plugins.endpoints.values())
    for role, guard in (("inference", guards.inference), ("management", guards.management)):
        own = [
            endpoint
            for endpoint in plugins.endpoints.values()
            if endpoint.role == role and role in roles
        ]
        app.add_routes(plugged.build_router(own, registry, limit))
        app.guards.update(
            {first: guard for endpoint in own if (first := endpoint.path.split("/")[1]) != "ping"}
        )
    app.add_routes(health.build_router(registry, roles))
    app.add_routes(kserve.build_router(registry, roles))
    app.guards["v1"] = guards.inference if "inference" in roles else guards.management
    app.guards["v2"] = guards.inference
    return app


def _introduce(apps: Mapping[str, ServerApp], addresses: Mapping[str, str]) -> None:
    """Tell each listener what the others have.

    `apps` are by their roles; where other machines can connect, no address is told.
    """
    is_local = all(parse_address(address).is_local for address in addresses.values())
    for app in apps.values():
        others = {roles: other for roles, other in apps.items() if other is not app}
        if is_local:
            app.elsewhere = {roles: addresses[roles.partition(" ")[0]] for roles in others}
        words = {
            roles: f"the {roles} address{f', {app.elsewhere[roles]}' if is_local else ''}"
            for roles in others
        }
        app.likely_paths = LikelyPaths(
            app.paths, {words[roles]: other.paths for roles, other in others.items()}
        )


async def limited(limits: ClientLimits, scope: Scope, send: Send) -> Send:
    """Count the request.

    Returns the `send` that holds answers to wrong tokens back. Raises TooManyRequests, after a
    while.
    """
    caller = Caller(limits, limits.caller(scope["client"][0], scope["headers"]))
    calling.set(caller)  # of the request's own task
    if scope["path"] not in UNLIMITED:
        try:
            limits.count_request(caller.client)
        except TooManyRequests:
            await asyncio.sleep(REFUSAL_DELAY_S)
            raise

    async def held(message: Message) -> None:
        if caller.hold:
            await asyncio.sleep(caller.hold)
            caller.hold = 0.0
        await send(message)

    return held
