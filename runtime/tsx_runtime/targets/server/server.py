"""The server process: its start, signals and stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from tsx_archiver import ArchiveError
from tsx_runtime.api.access.auth import check_required_tokens
from tsx_runtime.api.access.tokens import Keys, generated_tokens, start_keys
from tsx_runtime.api.messages import PlatformHook
from tsx_runtime.core.concurrency.events import wait_for_event
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.placement.hardware import raise_file_limit
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.telemetry.metricsconfig import read_metrics_config
from tsx_runtime.errors import TsxError
from tsx_runtime.features.torchserve.metric_log import metric_tasks
from tsx_runtime.features.torchserve.snapshots import Snapshots
from tsx_runtime.features.tracing.otlp import tracing
from tsx_runtime.features.workflows.feature import WorkflowsFeature
from tsx_runtime.features.workflows.manager import Workflow
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.build import build_apps
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.log_format import is_terminal, writes_json
from tsx_runtime.targets.observability.logging_setup import is_configured
from tsx_runtime.targets.observability.server_log import server_log
from tsx_runtime.targets.observability.worker_output import worker_output
from tsx_runtime.targets.server.grpc_listeners import (
    GrpcAddresses,
    bind,
    grpc_addresses,
    import_modules,
)
from tsx_runtime.targets.server.handover import (
    RESPONSE_TIMEOUT_S,
    Predecessor,
    find_predecessor,
    handover_path,
    replaceable,
)
from tsx_runtime.targets.server.listeners import Listener, listeners
from tsx_runtime.targets.server.startup import (
    LoadStatus,
    StartModel,
    StartWorkflow,
    check_models,
    load_all,
    load_workflows,
    log_privileges,
    register_all,
    report_loading,
    warn_of_unknown_models,
)
from tsx_runtime.targets.server.systemd import passed_sockets, use_sockets
from tsx_runtime.targets.server.tls import tls_context
from tsx_runtime.targets.server.uvicorn_servers import ServerGroup

logger = logging.getLogger("tsx.server")

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class RunningServer:
    """A server that answers requests.

    The keys of `addresses` are roles: inference, management, metrics, and those of gRPC.
    """

    addresses: dict[str, str]
    versions: list[ModelVersion]
    workflows: list[Workflow]
    registry: Registry


class HostedPlatform(PlatformHook, Protocol):
    """A platform whose health checks are answered while models load."""

    async def load(self, models: Sequence[StartModel]) -> None:
        """Load models while requests are answered; a TsxError or ArchiveError stops the server."""


@dataclass(frozen=True)
class StopEvents:
    """The events that stop a server; signals or another thread set them.

    Another thread must call `loop.call_soon_threadsafe(events.stop_requested.set)`.
    """

    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    stop_now: asyncio.Event = field(default_factory=asyncio.Event)  # set by a second Ctrl-C
    # set if another server has taken over the addresses
    replaced: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class ServeOptions:
    """Options of `serve`; the defaults are those of a plain `tsx serve`."""

    replace: bool = False  # whether to replace a running server
    # Whether the server answers requests while models load, and continues if some cannot be loaded.
    answer_first: bool = False
    snapshots: Snapshots | None = None
    on_bound: Callable[[], None] = lambda: None  # called once the addresses are bound
    on_answering: Callable[[], None] = lambda: None  # called once requests are answered
    # called at intervals while models load
    on_loading: Callable[[LoadStatus], None] | None = None
    # creates the platform for the app with the prediction routes
    make_platform: Callable[[Registry, ServerApp], HostedPlatform] | None = None
    # None means that signals stop the server; a server in a thread needs the events
    stop_events: StopEvents | None = None


DEFAULT_OPTIONS = ServeOptions()


@dataclass(frozen=True)
class _ServerParts:
    """The parts of a server that exist once its addresses are bound."""

    settings: Settings
    registry: Registry
    keys: Keys
    listeners: list[Listener]
    grpc: GrpcAddresses
    tls: ssl.SSLContext | None
    predecessor: Predecessor | None


def serve(
    settings: Settings,
    models: Sequence[StartModel],
    on_ready: Callable[[RunningServer], None] = lambda started: None,
    options: ServeOptions = DEFAULT_OPTIONS,
    workflows: Sequence[StartWorkflow] = (),
) -> None:
    """Serve until SIGINT or SIGTERM; return after the last accepted request is answered.

    After an error, all that was started is stopped.

    Raises:
        SettingError: An address or a token cannot be used. If a model cannot be loaded,
            `Registry.register_path` or `Workflows.register_path` raises other errors.
    """
    _run(serve_async(settings, models, on_ready, options, workflows))


async def serve_async(
    settings: Settings,
    models: Sequence[StartModel],
    on_ready: Callable[[RunningServer], None],
    options: ServeOptions,
    start_workflows: Sequence[StartWorkflow],
) -> None:
    settings, systemd_sockets = use_sockets(settings, passed_sockets(os.environ))
    check_required_tokens(settings)
    log_privileges(settings, os.environ, platform_decides=options.make_platform is not None)
    worker_files = raise_file_limit()
    stop_events = options.stop_events or StopEvents()
    tls = tls_context(settings)
    if options.stop_events is None:
        _stop_on_signals(stop_events)
    read_metrics_config(settings.metrics_config)
    grpc = grpc_addresses(settings)
    with contextlib.ExitStack() as stack:
        predecessor = stack.enter_context(find_predecessor(settings)) if options.replace else None
        if not options.answer_first and options.make_platform is None:
            check_models(models, settings)
        output = stack.enter_context(_worker_output(settings))
        # The registry is created before addresses are bound, because loading a plugin may fail.
        registry = Registry(
            settings,
            worker_files,
            output,
            replaces=predecessor is not None,
        )
        sockets = systemd_sockets if predecessor is None else predecessor.sockets | systemd_sockets
        bound_listeners = stack.enter_context(
            listeners(settings, sockets, grpc if predecessor is None else ())
        )
        keys = stack.enter_context(_open_keys(settings, predecessor, stop_events.replaced))
        if options.make_platform is None:
            registry.open()
        options.on_bound()
        registry.tracer = stack.enter_context(tracing(settings, os.environ))
        stack.enter_context(server_log(registry.models))
        registry.warm_up(model.path for model in models if model.path is not None)
        workflows = registry.feature(WorkflowsFeature).workflows
        import_task = asyncio.ensure_future(asyncio.to_thread(import_modules)) if grpc else None
        try:
            load = register_all if options.answer_first else load_all
            async with report_loading(registry, options.on_loading):
                versions = await _run_until(
                    stop_events.stop_requested,
                    load(registry, () if options.make_platform else models),
                )
            if import_task is not None:
                await import_task
            if (
                versions is None
                or await _run_until(
                    stop_events.stop_requested,
                    load_workflows(workflows, start_workflows, log_failures=options.answer_first),
                )
                is None
            ):
                return
            if options.make_platform is None:
                warn_of_unknown_models(settings, registry.names)
            make_server = partial(
                RunningServer,
                versions=versions,
                workflows=list(workflows.workflows.values()),
                registry=registry,
            )
            parts = _ServerParts(settings, registry, keys, bound_listeners, grpc, tls, predecessor)
            await _serve_requests(
                parts,
                stop_events,
                options,
                models,
                lambda addresses: on_ready(make_server(addresses)),
            )
        finally:
            await registry.close()


def _worker_output(settings: Settings) -> contextlib.AbstractContextManager[str]:
    """Return a context that collects workers' output, and yields the path of its socket.

    Output is collected for a separate log file, or to convert it to JSON lines. At a terminal, it
    is collected because the output of native code and programs could contain control sequences.
    """
    in_files = settings.log_location is not None
    is_json = writes_json(settings.log_format, in_files=in_files)
    if (in_files or (is_json and not is_configured(settings))) and hasattr(socket, "AF_UNIX"):
        return worker_output(is_json=is_json)
    if (
        sys.platform == "linux"
        and not is_json
        and (is_terminal(sys.stdout) or is_terminal(sys.stderr))
    ):
        return worker_output(at_terminal=True)
    return contextlib.nullcontext("")


@contextlib.contextmanager
def _open_keys(
    settings: Settings, predecessor: Predecessor | None, is_replaced: asyncio.Event
) -> Generator[Keys, None, None]:
    """Yield the keys, and remove their file at the end.

    A server that replaces another one has the same tokens, so the file then stays.
    """
    keys = start_keys(settings, None if predecessor is None else predecessor.tokens)
    if keys.file is not None:
        logger.info(
            "requests need tokens, which are in %s; send 'Authorization: Bearer TOKEN', or"
            " disable_token_authorization",
            keys.file,
        )
    try:
        yield keys
    finally:
        if not is_replaced.is_set() and (
            predecessor is None or predecessor.is_replaced or predecessor.has_ended
        ):
            keys.remove()


async def _serve_requests(
    parts: _ServerParts,
    stop_events: StopEvents,
    options: ServeOptions,
    models: Sequence[StartModel],
    on_ready: Callable[[dict[str, str]], None],
) -> None:
    """Listen, and answer requests until the stop; `on_ready` gets the addresses by role."""
    settings = parts.settings
    registry = parts.registry
    listeners = parts.listeners
    snapshots = options.snapshots
    for listener in listeners:
        listener.listen()
    addresses = {role: str(listener.address) for listener in listeners for role in listener.roles}
    roles = [listener.roles for listener in listeners]
    apps = build_apps(registry, settings, roles, parts.keys, addresses)
    platform = _make_platform(options, registry, apps)
    counts = apps[0].counts
    predecessor = parts.predecessor
    ports = bind(
        registry, settings, parts.keys, parts.grpc, counts, replaces=predecessor is not None
    )
    servers = ServerGroup(settings, apps, listeners, ports, parts.tls)
    try:
        async with contextlib.AsyncExitStack() as stack:
            system = apps[0].context.system
            await stack.enter_async_context(metric_tasks(registry, counts, system, settings))
            if predecessor is not None:
                await predecessor.take_over()
                try:
                    parts.keys.adopt_tokens(predecessor.tokens)
                except OSError as error:
                    logger.error(
                        "the tokens cannot be written to %s: %s", parts.keys.file, error.strerror
                    )
                for listener in listeners:
                    listener.take_over()
                for feature in registry.features:
                    feature.follow(settings.drain_timeout + RESPONSE_TIMEOUT_S)
            await servers.start()
            await stack.enter_async_context(registry.running())
            if snapshots is not None:
                snapshots.begin(registry)
            if options.stop_events is None:
                gc.collect()
                # Garbage collections block the loop. They should skip objects that are never freed:
                # modules, routes and schemas.
                gc.freeze()
            path = handover_path(settings) if options.make_platform is None else None
            # The tokens are read when they are needed, because clients may renew them.
            tokens = partial(generated_tokens, parts.keys, settings)

            def on_replaced() -> None:
                stop_events.replaced.set()
                parts.keys.hand_over()
                for feature in registry.features:
                    feature.hand_over()
                stop_events.stop_requested.set()

            async with replaceable(path, listeners, tokens, on_replaced) as handover:
                on_ready(servers.addresses)
                options.on_answering()
                failure = await _wait_for_stop(platform, models, stop_events)
            if handover.is_successor_ready:
                servers.leave()
                handover.confirm()
                logger.info(
                    "replaced by another server: a connection ends with its next answer, within"
                    " %d s",
                    settings.drain_timeout,
                )
            else:
                registry.stop()
            if snapshots is not None:
                snapshots.end(registry)
            if not handover.is_successor_ready:
                await _delay_stop(0 if failure else settings.shutdown_delay, stop_events.stop_now)
                if failure is None:
                    text = (
                        "stopping: no new requests; accepted requests are answered within %d s."
                        " Press Ctrl-C again to stop at once"
                    )
                    logger.info(text, settings.drain_timeout)
            drain = 0 if failure else settings.drain_timeout
            await asyncio.gather(
                servers.stop(registry, stop_events.stop_now, drain),
                *(feature.stop(drain, stop_events.stop_now) for feature in registry.features),
            )
            if handover.is_successor_loading:
                stop_events.replaced.set()
    finally:
        for app in apps:
            if app.access_log is not None:
                app.access_log.flush()
    if failure is not None:
        raise failure


def _make_platform(
    options: ServeOptions, registry: Registry, apps: Sequence[ServerApp]
) -> HostedPlatform | None:
    if options.make_platform is None:
        return None
    app = next(app for app in apps if app.predictions is not None)
    app.platform = platform = options.make_platform(registry, app)
    return platform


async def _wait_for_stop(
    platform: HostedPlatform | None, models: Sequence[StartModel], stop_events: StopEvents
) -> TsxError | ArchiveError | None:
    """Wait for a stop, or return the error of a model that could not be loaded."""
    try:
        if platform is not None:
            await _run_until(stop_events.stop_requested, platform.load(models))
        await stop_events.stop_requested.wait()
    except (TsxError, ArchiveError) as error:
        return error
    return None


async def _delay_stop(seconds: float, stop_now: asyncio.Event) -> None:
    """Continue to accept requests until load balancers notice that the server is not ready."""
    if seconds:
        logger.info(
            "stopping: no longer ready; requests are accepted for another %d s. Press Ctrl-C again"
            " to stop at once",
            seconds,
        )
        await wait_for_event(stop_now, seconds)


def _stop_on_signals(stop_events: StopEvents) -> None:
    """Handle signals: the first one requests a stop, and a second Ctrl-C an immediate stop."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop_events.stop_requested.is_set() and number == signal.SIGINT:
            stop_events.stop_now.set()
        stop_events.stop_requested.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        if sys.platform == "win32":
            signal.signal(number, lambda number, _: loop.call_soon_threadsafe(on_signal, number))
        else:
            loop.add_signal_handler(number, on_signal, number)


async def _run_until(stop: asyncio.Event, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """Return the result of `work`, or None if the stop comes first."""
    task, stop_task = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([task, stop_task], return_when=asyncio.FIRST_COMPLETED)
    stop_task.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    return None


def _run(main: Coroutine[Any, Any, None]) -> None:
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        # The package uvloop does not exist on Windows.
        import uvloop

        uvloop.run(main)
