"""The server process: its start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from tsx_runtime.api.messages import PlatformHook
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.placement.hardware import raise_file_limit
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import LoadedItem, StartItem
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.build import build_apps
from tsx_runtime.http.tls import tls_context
from tsx_runtime.metrics.sinks import metric_tasks
from tsx_runtime.server.handover import (
    Predecessor,
    find_predecessor,
    handover_path,
    open_keys,
    replaceable,
    take_over,
)
from tsx_runtime.server.listeners import Listener, check_free, listeners
from tsx_runtime.server.server_log import server_log
from tsx_runtime.server.startup import (
    LoadStatus,
    StartModel,
    check_models,
    check_settings,
    load_all,
    load_items,
    register_all,
    report_loading,
    warn_of_unknown_models,
)
from tsx_runtime.server.stopping import StopEvents
from tsx_runtime.server.systemd import passed_sockets, use_sockets
from tsx_runtime.server.uvicorn_servers import ServerGroup
from tsx_runtime.settings.schema import Settings

logger = logging.getLogger("tsx.server")


@dataclass(frozen=True)
class RunningServer:
    """A server that answers requests.

    The keys of `addresses` are roles: inference, management, metrics, and the roles of `Port`.
    """

    addresses: dict[str, str]
    versions: list[ModelVersion]
    items: list[LoadedItem]
    registry: Registry


class HostedPlatform(PlatformHook, Protocol):
    """A platform whose health checks are answered while models load."""

    async def load(self, models: Sequence[StartModel]) -> None:
        """Load models while requests are answered; a TsxError or ArchiveError stops the server."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of `serve`; the defaults are those of a plain `tsx serve`."""

    replace: bool = False  # whether to replace a running server
    # Whether the server answers requests while models load, and continues if some cannot be loaded.
    answer_first: bool = False
    on_bound: Callable[[], None] = lambda: None  # called once the addresses are bound
    on_answering: Callable[[], None] = lambda: None  # called once requests are answered
    # returns a context that is open while requests are accepted
    accepting: Callable[[Registry], AbstractAsyncContextManager[object]] = contextlib.nullcontext
    # called at intervals while models load
    on_loading: Callable[[LoadStatus], None] | None = None
    # creates the platform for the app with the prediction routes
    make_platform: Callable[[Registry, ServerApp], HostedPlatform] | None = None
    # None means that signals stop the server; a server in a thread needs the events
    stop_events: StopEvents | None = None


DEFAULT_OPTIONS = ServeOptions()


def serve(
    settings: Settings,
    models: Sequence[StartModel],
    on_ready: Callable[[RunningServer], None] = lambda started: None,
    options: ServeOptions = DEFAULT_OPTIONS,
    items: Sequence[StartItem] = (),
) -> None:
    """Serve until SIGINT or SIGTERM; return after the last accepted request is answered.

    After an error, all that was started is stopped.

    Raises:
        SettingError: An address or a token cannot be used. If a model cannot be loaded,
            `Registry.register_path` raises other errors, and so does `Feature.load`.
    """
    _run(serve_async(settings, models, on_ready, options, items))


async def serve_async(
    settings: Settings,
    models: Sequence[StartModel],
    on_ready: Callable[[RunningServer], None],
    options: ServeOptions,
    items: Sequence[StartItem],
) -> None:
    settings, systemd_sockets = use_sockets(settings, passed_sockets(os.environ))
    check_settings(settings, os.environ, platform_decides=options.make_platform is not None)
    worker_files = raise_file_limit()
    stop_events = options.stop_events or StopEvents()
    tls = tls_context(settings)
    if options.stop_events is None:
        stop_events.handle_signals()
    with contextlib.ExitStack() as stack:
        predecessor = stack.enter_context(find_predecessor(settings)) if options.replace else None
        if not options.answer_first and options.make_platform is None:
            check_models(models, settings)
        log = stack.enter_context(server_log(settings))
        # The registry is created before addresses are bound, because loading a plugin may fail.
        registry = Registry(settings, worker_files, log.output, replaces=predecessor is not None)
        feature_addresses = [
            address for feature in registry.features for address in feature.addresses()
        ]
        sockets = systemd_sockets if predecessor is None else predecessor.sockets | systemd_sockets
        bound_listeners = stack.enter_context(
            listeners(settings, sockets, feature_addresses if predecessor is None else ())
        )
        keys = stack.enter_context(open_keys(settings, predecessor, stop_events.replaced))
        if options.make_platform is None:
            registry.open()
        options.on_bound()
        for feature in registry.features:
            stack.enter_context(feature.serving())
        log.models = registry.models
        registry.warm_up(model.path for model in models if model.path is not None)
        try:
            load = register_all if options.answer_first else load_all
            async with report_loading(registry, options.on_loading):
                versions = await stop_events.run_until_stop(
                    load(registry, () if options.make_platform else models)
                )
            if versions is None:
                return
            loaded_items = await stop_events.run_until_stop(
                load_items(registry, items, log_failures=options.answer_first)
            )
            if loaded_items is None:
                return
            if options.make_platform is None:
                warn_of_unknown_models(registry)
            for listener in bound_listeners:
                listener.listen()
            addresses = {
                role: str(listener.address)
                for listener in bound_listeners
                for role in listener.roles
            }
            apps = build_apps(
                registry,
                settings,
                [listener.roles for listener in bound_listeners],
                keys,
                addresses,
            )
            if predecessor is None:
                # Sockets of gRPC share ports, so binding them does not fail if another server has
                # taken a port in the meantime.
                check_free(feature_addresses)
            ports = [
                port
                for feature in registry.features
                for port in await feature.listen(apps[0].context)
            ]
            await _serve_requests(
                apps,
                bound_listeners,
                ServerGroup(settings, apps, bound_listeners, ports, tls),
                predecessor,
                stop_events,
                options,
                models,
                lambda addresses: on_ready(
                    RunningServer(addresses, versions, loaded_items, registry)
                ),
            )
        finally:
            await registry.close()


async def _serve_requests(
    apps: Sequence[ServerApp],
    listeners: Sequence[Listener],
    servers: ServerGroup,
    predecessor: Predecessor | None,
    stop_events: StopEvents,
    options: ServeOptions,
    models: Sequence[StartModel],
    on_ready: Callable[[dict[str, str]], None],
) -> None:
    """Answer requests until the stop; `on_ready` gets the addresses by role."""
    context = apps[0].context
    settings, registry, keys = context.settings, context.registry, context.keys
    try:
        platform = _make_platform(options, registry, apps)
        async with contextlib.AsyncExitStack() as stack:
            sinks = registry.plugins.metrics_sinks
            await stack.enter_async_context(
                metric_tasks(registry, context.counts, context.system, sinks)
            )
            if predecessor is not None:
                await take_over(predecessor, registry, listeners, keys)
            await servers.start()
            await stack.enter_async_context(registry.running())
            if options.stop_events is None:
                gc.collect()
                # Garbage collections block the loop. They should skip objects that are never freed:
                # modules, routes and schemas.
                gc.freeze()

            def on_replaced() -> None:
                stop_events.replaced.set()
                keys.hand_over()
                for feature in registry.features:
                    feature.hand_over()
                stop_events.stop_requested.set()

            path = handover_path(settings) if options.make_platform is None else None
            async with (
                options.accepting(registry),
                replaceable(path, settings, listeners, keys, on_replaced) as handover,
            ):
                on_ready(servers.addresses)
                options.on_answering()
                loading = None if platform is None else platform.load(models)
                failure = await stop_events.wait(loading)
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
                await stop_events.delay_stop(0 if failure else settings.shutdown_delay)
                if failure is None:
                    text = (
                        "stopping: no new requests; accepted requests are answered within %d s."
                        " Press Ctrl-C again to stop at once"
                    )
                    logger.info(text, settings.drain_timeout)
            drain = 0 if failure else settings.drain_timeout
            # If a feature fails to stop, requests are still answered.
            errors = await asyncio.gather(
                servers.stop(registry, stop_events.stop_now, drain),
                *(feature.stop(drain, stop_events.stop_now) for feature in registry.features),
                return_exceptions=True,
            )
            failure = failure or next(filter(None, errors), None)
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


def _run(main: Coroutine[Any, Any, None]) -> None:
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        # The package uvloop does not exist on Windows.
        import uvloop

        uvloop.run(main)
