"""The server process: ports, signals, start and stop."""

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
from tsx_runtime.core.concurrency.periodic import repeat, running
from tsx_runtime.core.elastic.decision import INTERVAL_S
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.placement.hardware import raise_file_limit
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.telemetry.metricsconfig import read_metrics_config
from tsx_runtime.core.telemetry.time_series import TimeSeries
from tsx_runtime.errors import TsxError
from tsx_runtime.http.app import ServerApp, build_apps
from tsx_runtime.http.asgi_lane.stored_requests import make_jobs
from tsx_runtime.jobs.service import Jobs
from tsx_runtime.metrics.gpu import gpu_processes
from tsx_runtime.metrics.torchserve_log import metric_tasks
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.log_format import is_terminal, writes_json
from tsx_runtime.targets.observability.logging_setup import is_configured
from tsx_runtime.targets.observability.otlp import tracing
from tsx_runtime.targets.observability.server_log import server_log
from tsx_runtime.targets.observability.worker_output import worker_output
from tsx_runtime.targets.server.grpc_listeners import GrpcAddresses, bind, grpc_addresses, prepare
from tsx_runtime.targets.server.handover import (
    RESPONSE_TIMEOUT_S,
    Predecessor,
    find_predecessor,
    handover_path,
    replaceable,
)
from tsx_runtime.targets.server.listeners import Listener, listeners
from tsx_runtime.targets.server.snapshots import Snapshots
from tsx_runtime.targets.server.startup import (
    LoadStatus,
    StartModel,
    StartWorkflow,
    check_models,
    load_all,
    load_workflows,
    log_privileges,
    register_all,
    warn_of_unknown_models,
    watched_loading,
)
from tsx_runtime.targets.server.systemd import passed_sockets, use_sockets
from tsx_runtime.targets.server.tls import tls_context
from tsx_runtime.targets.server.uvicorn_servers import ServerGroup
from tsx_runtime.workflows.manager import Workflow, Workflows

logger = logging.getLogger("tsx.server")

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class RunningServer:
    """A server that answers.

    The roles are inference, management, metrics, and those of gRPC if it is served.
    """

    addresses: dict[str, str]
    versions: list[ModelVersion]
    workflows: list[Workflow]
    registry: Registry


class HostedPlatform(PlatformHook, Protocol):
    """A platform that sends health checks from the start of the server."""

    async def load(self, models: Sequence[StartModel]) -> None:
        """Load models while requests are answered; a TsxError or ArchiveError ends the server."""


@dataclass(frozen=True)
class StopEvents:
    """Requests to stop, from signals or from another thread.

    The latter calls `loop.call_soon_threadsafe(events.asked.set)`.
    """

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # set by a second Ctrl-C
    # Another server has the addresses, and asks for the stop.
    replaced: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class ServeOptions:
    """Options in which a start may differ from that of `tsx serve`."""

    replace: bool = False  # whether to take the addresses over from a running server
    # Models load while the server already answers, and it continues without those that fail.
    answer_first: bool = False
    snapshots: Snapshots | None = None
    on_bound: Callable[[], None] = lambda: None  # called once the addresses are bound
    on_answering: Callable[[], None] = lambda: None  # called once requests are answered
    # Called at intervals while models load.
    on_loading: Callable[[LoadStatus], None] | None = None
    # The app is the one with the prediction routes.
    hosted: Callable[[Registry, ServerApp], HostedPlatform] | None = None
    # Set for a server in a thread of a foreign process. None: signals stop the server.
    stopping: StopEvents | None = None


DEFAULT_OPTIONS = ServeOptions()


@dataclass(frozen=True)
class _ServerParts:
    """The parts of a server whose addresses are bound."""

    settings: Settings
    registry: Registry
    workflows: Workflows
    keys: Keys
    listeners: list[Listener]
    grpc: GrpcAddresses
    tls: ssl.SSLContext | None
    jobs: Jobs | None
    predecessor: Predecessor | None


def serve(
    settings: Settings,
    models: Sequence[StartModel],
    on_ready: Callable[[RunningServer], None] = lambda started: None,
    options: ServeOptions = DEFAULT_OPTIONS,
    workflows: Sequence[StartWorkflow] = (),
) -> None:
    """Serve until SIGINT or SIGTERM, then answer all accepted requests and return.

    An error ends everything that was started.

    Raises:
        SettingError: An address or a token cannot be used. `Registry.register_path` and
            `Workflows.register_path` raise other errors for models that cannot be loaded.
    """
    _run(serve_async(settings, models, on_ready, options, workflows))


async def serve_async(
    settings: Settings,
    models: Sequence[StartModel],
    on_ready: Callable[[RunningServer], None],
    options: ServeOptions,
    starts: Sequence[StartWorkflow],
) -> None:
    settings, passed = use_sockets(settings, passed_sockets(os.environ))
    check_required_tokens(settings)
    log_privileges(settings, os.environ, platform_decides=options.hosted is not None)
    worker_files = raise_file_limit()
    stopping = options.stopping or StopEvents()
    tls = tls_context(settings)
    if options.stopping is None:
        _stop_on_signals(stopping)
    read_metrics_config(settings.metrics_config)
    grpc = grpc_addresses(settings)
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(find_predecessor(settings)) if options.replace else None
        if not options.answer_first and options.hosted is None:
            check_models(models, settings)
        output = stack.enter_context(_worker_output(settings))
        # The registry comes before the ports, because a plugin may be missing.
        registry = Registry(
            settings,
            worker_files,
            output,
            replaces=old is not None,
            gpu_processes=gpu_processes,
        )
        sockets = passed if old is None else old.sockets | passed
        bound = stack.enter_context(listeners(settings, sockets, grpc if old is None else ()))
        keys = stack.enter_context(_keys(settings, old, stopping.replaced))
        jobs = None if options.hosted else make_jobs(registry, settings)
        options.on_bound()
        registry.tracer = stack.enter_context(tracing(settings, os.environ))
        stack.enter_context(server_log(registry.models))
        registry.warm_up(model.path for model in models if model.path is not None)
        workflows = Workflows(registry)
        import_task = asyncio.ensure_future(asyncio.to_thread(prepare)) if grpc else None
        try:
            load = register_all if options.answer_first else load_all
            async with watched_loading(registry, options.on_loading):
                versions = await _run_until(
                    stopping.asked, load(registry, () if options.hosted else models)
                )
            if import_task is not None:
                await import_task
            if (
                versions is None
                or await _run_until(
                    stopping.asked,
                    load_workflows(workflows, starts, or_log=options.answer_first),
                )
                is None
            ):
                return
            if options.hosted is None:
                warn_of_unknown_models(settings, registry.names)
            make_server = partial(
                RunningServer,
                versions=versions,
                workflows=list(workflows.workflows.values()),
                registry=registry,
            )
            parts = _ServerParts(settings, registry, workflows, keys, bound, grpc, tls, jobs, old)
            await _answer(
                parts,
                stopping,
                options,
                models,
                lambda addresses: on_ready(make_server(addresses)),
            )
        finally:
            workflows.close()
            await registry.close()


def _worker_output(settings: Settings) -> contextlib.AbstractContextManager[str]:
    """Return a context that collects workers' output, and yields the path of its socket.

    With log files, workers have their own file. With a JSON log, one process writes all lines. At a
    terminal, this process writes the output of native code and of programs, which could contain
    control sequences.
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
def _keys(
    settings: Settings, old: Predecessor | None, is_replaced: asyncio.Event
) -> Generator[Keys, None, None]:
    """Yield the keys, whose file exists as long as the server.

    Servers that replace each other have the same tokens.
    """
    keys = start_keys(settings, None if old is None else old.tokens)
    if keys.file is not None:
        logger.info(
            "requests need tokens, which are in %s; send 'Authorization: Bearer TOKEN', or"
            " disable_token_authorization",
            keys.file,
        )
    try:
        yield keys
    finally:
        if not is_replaced.is_set() and (old is None or old.replaced or old.has_ended):
            keys.remove()


async def _answer(
    parts: _ServerParts,
    stopping: StopEvents,
    options: ServeOptions,
    models: Sequence[StartModel],
    on_ready: Callable[[dict[str, str]], None],
) -> None:
    """Serve from the first request to the last; `on_ready` gets the addresses by role."""
    settings = parts.settings
    registry = parts.registry
    listeners = parts.listeners
    snapshots = options.snapshots
    jobs = parts.jobs
    for listener in listeners:
        listener.listen()
    series = TimeSeries(registry.models.values)
    addresses = {role: str(listener.address) for listener in listeners for role in listener.roles}
    roles = [listener.roles for listener in listeners]
    apps = build_apps(
        registry, settings, roles, parts.keys, parts.workflows, series, addresses, parts.jobs
    )
    hosted = _hosted(options, registry, apps)
    counts = apps[0].counts
    old = parts.predecessor
    ports = bind(registry, settings, parts.keys, parts.grpc, counts, replaces=old is not None)
    servers = ServerGroup(settings, apps, listeners, ports, parts.tls)
    try:
        async with (
            metric_tasks(registry, counts, apps[0].system, settings),
            running(
                "charts stand still, or cores are not shared anew,",
                repeat(1.0, series.sample),
                repeat(1.0, registry.cores.share),
            ),
            running(
                "models keep their number of workers", repeat(INTERVAL_S, registry.elastic.adjust)
            ),
        ):
            if old is not None:
                await old.take_over()
                try:
                    parts.keys.follow(old.tokens)
                except OSError as error:
                    logger.error(
                        "the tokens cannot be written to %s: %s", parts.keys.file, error.strerror
                    )
                for listener in listeners:
                    listener.take_over()
                if jobs is not None:
                    jobs.store.follow(settings.drain_timeout + RESPONSE_TIMEOUT_S)
            await servers.start()
            # Models are registered, so a stored request for an unknown one can be refused.
            if jobs is not None:
                await jobs.resume()
            if snapshots is not None:
                snapshots.begin(registry)
            if options.stopping is None:
                gc.collect()
                # Modules, routes and schemas stay for ever, so collections, which block the loop,
                # should skip them.
                gc.freeze()
            path = handover_path(settings) if options.hosted is None else None
            # Clients renew the tokens, so they are read when they are needed.
            tokens = partial(generated_tokens, parts.keys, settings)

            def on_replaced() -> None:
                stopping.replaced.set()
                parts.keys.hand_over()
                if jobs is not None:
                    jobs.store.hand_over()
                stopping.asked.set()

            async with replaceable(path, listeners, tokens, on_replaced) as handover:
                on_ready(servers.addresses)
                options.on_answering()
                failure = await _wait_for_stop(hosted, models, stopping)
            if handover.is_taken:
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
            if not handover.is_taken:
                await _delay(0 if failure else settings.shutdown_delay, stopping.hurry)
                if failure is None:
                    text = (
                        "stopping: no new requests; accepted requests are answered within %d s."
                        " Press Ctrl-C again to stop at once"
                    )
                    logger.info(text, settings.drain_timeout)
            drain = 0 if failure else settings.drain_timeout
            await asyncio.gather(
                servers.stop(registry, stopping.hurry, drain),
                *([] if jobs is None else [jobs.stop(drain, stopping.hurry)]),
            )
            if handover.is_awaited:
                stopping.replaced.set()
    finally:
        if jobs is not None:
            await jobs.close()
        for app in apps:
            if app.access_log is not None:
                app.access_log.flush()
    if failure is not None:
        raise failure


def _hosted(
    options: ServeOptions, registry: Registry, apps: Sequence[ServerApp]
) -> HostedPlatform | None:
    if options.hosted is None:
        return None
    app = next(app for app in apps if app.predictions is not None)
    app.platform = hosted = options.hosted(registry, app)
    return hosted


async def _wait_for_stop(
    hosted: HostedPlatform | None, models: Sequence[StartModel], stopping: StopEvents
) -> TsxError | ArchiveError | None:
    """Wait for a stop, or for the failure of a model that loads while the server answers."""
    try:
        if hosted is not None:
            await _run_until(stopping.asked, hosted.load(models))
        await stopping.asked.wait()
    except (TsxError, ArchiveError) as error:
        return error
    return None


async def _delay(seconds: float, hurry: asyncio.Event) -> None:
    """Continue to answer while load balancers notice that the server is no longer ready."""
    if seconds:
        logger.info(
            "stopping: no longer ready; requests are accepted for another %d s. Press Ctrl-C again"
            " to stop at once",
            seconds,
        )
        await wait_for_event(hurry, seconds)


def _stop_on_signals(stopping: StopEvents) -> None:
    """Let the first signal request a stop, and a second Ctrl-C an immediate one."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stopping.asked.is_set() and number == signal.SIGINT:
            stopping.hurry.set()
        stopping.asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        if sys.platform == "win32":
            signal.signal(number, lambda number, _: loop.call_soon_threadsafe(on_signal, number))
        else:
            loop.add_signal_handler(number, on_signal, number)


async def _run_until(stop: asyncio.Event, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """Return the result of `work`, or None if the stop comes first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    return None


def _run(main: Coroutine[Any, Any, None]) -> None:
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        import uvloop  # unavailable on Windows

        uvloop.run(main)
