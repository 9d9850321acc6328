"""A server of its own: ports, signals, start and end."""

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
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn

from tsx_runtime.core.descriptors import raise_limit
from tsx_runtime.core.metricsconfig import read_metrics_config
from tsx_runtime.core.model import ModelVersion
from tsx_runtime.core.registry import Registry
from tsx_runtime.core.series import Series, sampling
from tsx_runtime.core.serverlog import server_log
from tsx_runtime.http.app import ServerApp, build_apps
from tsx_runtime.http.auth import required_tokens
from tsx_runtime.http.metric_log import metric_tasks
from tsx_runtime.http.tokens import Keys, start_keys
from tsx_runtime.http.uvicorn_contract import http_protocol
from tsx_runtime.loglines import writes_json
from tsx_runtime.settings import Settings
from tsx_runtime.targets.grpc_ports import GrpcAddresses, Port, bind, check_free, grpc_addresses, prepare
from tsx_runtime.targets.listen import BACKLOG, Listener, listeners
from tsx_runtime.targets.otlp import tracing
from tsx_runtime.targets.snapshots import Snapshots
from tsx_runtime.targets.start import StartModel, load_all, register_all
from tsx_runtime.targets.tls import tls_context
from tsx_runtime.targets.workeroutput import worker_output
from tsx_runtime.targets.workflows import StartWorkflow, load_workflows
from tsx_runtime.workflows.manager import Workflow, Workflows

LAST_WORDS = 5  # seconds that clients may take to read their refusals once the time to drain is over
TLS_GOODBYE = 2  # seconds that a client may take to agree that a TLS connection is closed; an idle one does not read, so never does

logger = logging.getLogger("tsx.server")

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Started:
    """What is there once the server answers: roles are inference, management, metrics, and those of gRPC where it is served."""

    addresses: dict[str, str]
    versions: list[ModelVersion]
    workflows: list[Workflow]
    registry: Registry


@dataclass(frozen=True)
class Manner:
    """How a server starts, where it is not to start as `tsx serve` does."""

    answer_first: bool = False  # models load while it answers already, and it goes on without those that do not
    snapshots: Snapshots | None = None
    on_bound: Callable[[], None] = lambda: None  # no other program has its addresses


USUAL = Manner()


def serve(
    settings: Settings,
    models: Sequence[StartModel],
    on_ready: Callable[[Started], None] = lambda started: None,
    manner: Manner = USUAL,
    workflows: Sequence[StartWorkflow] = (),
) -> None:
    """Serve until SIGINT or SIGTERM, then answer what was accepted and return.

    Raises SettingError (an address, a missing token) and what `Registry.register_path` and `Workflows.register_path` raise for what
    cannot be loaded; by then everything that was started is ended.
    """
    _run(serve_async(settings, models, on_ready, manner, workflows))


async def serve_async(
    settings: Settings,
    models: Sequence[StartModel],
    on_ready: Callable[[Started], None],
    manner: Manner,
    to_load: Sequence[StartWorkflow],
) -> None:
    required_tokens(settings)
    worker_files = raise_limit()
    stop, hurry = asyncio.Event(), asyncio.Event()
    tls = tls_context(settings)
    _stop_on_signals(stop, hurry)
    read_metrics_config(settings.metrics_config)
    grpc = grpc_addresses(settings)
    check_free(grpc)
    with listeners(settings) as bound, _keys(settings) as keys, _worker_output(settings) as output, contextlib.ExitStack() as held:
        manner.on_bound()
        registry = Registry(settings, worker_files, output)
        registry.tracer = held.enter_context(tracing(settings, os.environ))
        held.enter_context(server_log(registry.models))
        registry.warm_up(model.path for model in models if model.path is not None)
        workflows = Workflows(registry)
        prepared = asyncio.ensure_future(asyncio.to_thread(prepare)) if grpc else None
        try:
            load = register_all if manner.answer_first else load_all
            versions = await _unless(stop, load(registry, models))
            if prepared is not None:
                await prepared
            if versions is not None and await _unless(stop, load_workflows(workflows, to_load, or_tell=manner.answer_first)) is not None:
                await _answer(settings, registry, keys, workflows, bound, tls, grpc, versions, on_ready, manner.snapshots, stop, hurry)
        finally:
            workflows.close()
            await registry.close()


def _worker_output(settings: Settings) -> contextlib.AbstractContextManager[str]:
    """Where there are log files, workers have one of their own."""
    if settings.log_location is not None and hasattr(socket, "AF_UNIX"):
        return worker_output(is_json=writes_json(settings.log_format, in_files=True))
    return contextlib.nullcontext("")


@contextlib.contextmanager
def _keys(settings: Settings) -> Generator[Keys, None, None]:
    """Their file is there for as long as the server is."""
    keys = start_keys(settings)
    if keys.file is not None:
        logger.info("requests need tokens, which are in %s; send 'Authorization: Bearer TOKEN', or disable_token_authorization", keys.file)
    try:
        yield keys
    finally:
        keys.remove()


async def _answer(
    settings: Settings,
    registry: Registry,
    keys: Keys,
    workflows: Workflows,
    bound: list[Listener],
    tls: ssl.SSLContext | None,
    grpc: GrpcAddresses,
    versions: list[ModelVersion],
    on_ready: Callable[[Started], None],
    snapshots: Snapshots | None,
    stop: asyncio.Event,
    hurry: asyncio.Event,
) -> None:
    for listener in bound:
        listener.listen()
    series = Series(registry.models.values)
    places = {role: str(listener.address) for listener in bound for role in listener.roles}
    apps = build_apps(registry, settings, [listener.roles for listener in bound], keys, workflows, series, places)
    grpc_ports = bind(registry, settings, keys, grpc, apps[0].counts)
    try:
        async with metric_tasks(registry, apps[0].counts, apps[0].system, settings), sampling(series):
            loaded = list(workflows.workflows.values())
            await _run_servers(settings, registry, apps, grpc_ports, bound, tls, versions, loaded, on_ready, snapshots, stop, hurry)
    finally:
        for app in apps:
            if app.access_log is not None:
                app.access_log.flush()


async def _run_servers(
    settings: Settings,
    registry: Registry,
    apps: list[ServerApp],
    grpc_ports: list[Port],
    bound: list[Listener],
    tls: ssl.SSLContext | None,
    versions: list[ModelVersion],
    workflows: list[Workflow],
    on_ready: Callable[[Started], None],
    snapshots: Snapshots | None,
    stop: asyncio.Event,
    hurry: asyncio.Event,
) -> None:
    http = http_protocol()
    servers = [_Server(app, http, settings, listener, tls) for app, listener in zip(apps, bound, strict=True)]
    running = [asyncio.create_task(server.serve()) for server in servers]
    for server, task in zip(servers, running, strict=True):
        await _listening(server.up, task)
    for port in grpc_ports:
        await port.server.start()
    if snapshots is not None:
        snapshots.begin(registry)
    gc.collect()
    gc.freeze()  # modules, routes and schemas stay: no collection, during which nothing is answered, needs to look at them again
    places = {role: str(listener.address) for listener in bound for role in listener.roles}
    places |= {role: port.target for port in grpc_ports for role in port.roles}
    on_ready(Started(places, versions, workflows, registry))
    await stop.wait()
    registry.stop()
    if snapshots is not None:
        snapshots.end(registry)
    await _delay(settings.shutdown_delay, hurry)
    logger.info("stopping: no new requests; what was accepted is answered within %d s. Ctrl-C again: at once", settings.drain_timeout)
    end = time.monotonic() + settings.drain_timeout
    predicts = ["inference" in listener.roles for listener in bound]
    for now in (True, False):  # whether it is alive, and how far it is, can be asked until the last prediction is answered
        for server, listener, first in zip(servers, bound, predicts, strict=True):
            if first is now:
                listener.leave()
                server.should_exit = True
        ending: list[Awaitable[Any]] = [task for task, first in zip(running, predicts, strict=True) if first is now]
        left = max(0.0, end - time.monotonic())
        if now:
            ending += [port.server.stop(left + LAST_WORDS) for port in grpc_ports]
        await _drain(asyncio.gather(*ending), registry, hurry, left)


async def _listening(up: asyncio.Event, running: asyncio.Task[None]) -> None:
    """Wait until the server listens. Raises what keeps it from that."""
    waiting = asyncio.create_task(up.wait())
    await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        running.result()


async def _delay(seconds: float, hurry: asyncio.Event) -> None:
    """Go on while balancers find out that the server is not ready any more."""
    if seconds:
        logger.info("stopping: not ready any more; requests are taken for another %d s. Ctrl-C again: at once", seconds)
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(hurry.wait(), seconds)


async def _drain(answering: asyncio.Future[Any], registry: Registry, hurry: asyncio.Event, timeout: float) -> None:
    """Wait until the servers have answered everything; past the timeout, or when somebody loses patience, what is left is refused."""
    hurried: asyncio.Future[Any] = asyncio.ensure_future(hurry.wait())
    await asyncio.wait([answering, hurried], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not answering.done():
        await registry.close()  # refuses what waits and ends the workers: that, too, is an answer to each request
    await answering


def _uvicorn_config(app: Any, http: Any, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.keep_alive_timeout,
        proxy_headers=False,  # X-Forwarded-* is not believed
        timeout_graceful_shutdown=settings.drain_timeout + LAST_WORDS,
    )


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers and its way to listen: signals and sockets are this module's."""

    def __init__(self, app: Any, http: Any, settings: Settings, listener: Listener, tls: ssl.SSLContext | None) -> None:
        super().__init__(_uvicorn_config(app, http, settings))
        self.sock = listener.sock
        self.up = asyncio.Event()
        self.options: dict[str, Any] = {}
        if listener.address.scheme == "https":
            self.options = {"ssl": tls, "ssl_handshake_timeout": settings.header_timeout}
            if sys.version_info >= (3, 11) or sys.platform != "win32":  # uvloop has it always
                self.options["ssl_shutdown_timeout"] = TLS_GOODBYE

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        server = await asyncio.get_running_loop().create_server(self._connection, sock=self.sock, backlog=BACKLOG, **self.options)
        self.servers.append(server)
        self.up.set()

    def _connection(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        made: asyncio.Protocol = protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _stop_on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """The first signal asks for a stop. A second Ctrl-C is a person who does not want to wait for it."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set() and number == signal.SIGINT:
            hurry.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        if sys.platform == "win32":
            signal.signal(number, lambda number, _: loop.call_soon_threadsafe(on_signal, number))
        else:
            loop.add_signal_handler(number, on_signal, number)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """The result of `work`, or None if the stop comes first."""
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
        import uvloop  # here, because it does not exist for Windows

        uvloop.run(main)
