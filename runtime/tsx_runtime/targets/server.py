"""A server of its own: ports, signals, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from tsx_archiver import ARCHIVE_SUFFIXES
from tsx_runtime.core.model import ModelVersion, RegisterOrder
from tsx_runtime.core.registry import Registry
from tsx_runtime.errors import LoadFailed, SettingError
from tsx_runtime.http.app import build_apps
from tsx_runtime.http.auth import required_tokens
from tsx_runtime.http.protocol import FastLane
from tsx_runtime.settings import Settings
from tsx_runtime.targets.listen import Address, addresses, bind, bound_address, listen

LAST_WORDS = 5  # seconds that clients may take to read their refusals once the time to drain is over

logger = logging.getLogger("tsx.server")


@dataclass(frozen=True)
class StartModel:
    """A model to load before the server answers."""

    path: Path
    order: RegisterOrder


@dataclass(frozen=True)
class Started:
    """What is there once the server answers: roles are inference, management and metrics."""

    addresses: dict[str, str]
    versions: list[ModelVersion]
    registry: Registry


def serve(settings: Settings, models: Sequence[StartModel], on_ready: Callable[[Started], None] = lambda started: None) -> None:
    """Serve until SIGINT or SIGTERM, then answer what was accepted and return.

    Raises SettingError (an address, a missing token) and what `Registry.register_path` raises for a model that cannot be loaded;
    by then everything that was started is ended.
    """
    _run(serve_async(settings, models, on_ready))


async def serve_async(settings: Settings, models: Sequence[StartModel], on_ready: Callable[[Started], None]) -> None:
    required_tokens(settings)
    stop, hurry = asyncio.Event(), asyncio.Event()
    _stop_on_signals(stop, hurry)
    with contextlib.ExitStack() as stack:
        bound: dict[Address, tuple[socket.socket, list[str]]] = {}
        for address, roles in addresses(settings).items():
            sock = stack.enter_context(bind(address, roles))
            bound[bound_address(sock, address)] = (sock, roles)
        registry = Registry(settings)
        registry.warm_up(model.path for model in models)
        try:
            versions = await _unless(stop, _load(registry, models))
            if versions is not None:
                await _answer(settings, registry, bound, versions, on_ready, stop, hurry)
        finally:
            await registry.close()


async def _load(registry: Registry, models: Sequence[StartModel]) -> list[ModelVersion]:
    """All models side by side; the first that fails ends the start."""
    tasks = [asyncio.create_task(_register(registry, model)) for model in models]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _register(registry: Registry, model: StartModel) -> ModelVersion:
    try:
        return await registry.register_path(model.path, model.order)
    except LoadFailed as error:  # of several models, this one
        raise LoadFailed(f"{model.order.url} does not load: {error.message}", traceback=error.traceback) from error


async def _answer(
    settings: Settings,
    registry: Registry,
    bound: dict[Address, tuple[socket.socket, list[str]]],
    versions: list[ModelVersion],
    on_ready: Callable[[Started], None],
    stop: asyncio.Event,
    hurry: asyncio.Event,
) -> None:
    for address, (sock, roles) in bound.items():
        listen(sock, address, roles)
    apps = build_apps(registry, settings, [roles for _, roles in bound.values()])
    servers = [_Server(_uvicorn_config(app, settings), sock) for app, (sock, _) in zip(apps, bound.values(), strict=True)]
    running = [asyncio.create_task(server.serve([server.sock])) for server in servers]
    for server in servers:
        await server.up.wait()
    on_ready(Started({role: str(address) for address, (_, roles) in bound.items() for role in roles}, versions, registry))
    await stop.wait()
    logger.info("stopping: no new requests; what was accepted is answered within %d s. Ctrl-C again: at once", settings.drain_timeout)
    for server in servers:
        server.should_exit = True
    await _drain(asyncio.gather(*running), registry, hurry, settings.drain_timeout)


async def _drain(answering: asyncio.Future[Any], registry: Registry, hurry: asyncio.Event, timeout: float) -> None:
    """Wait until the servers have answered everything; past the timeout, or when somebody loses patience, what is left is refused."""
    hurried: asyncio.Future[Any] = asyncio.ensure_future(hurry.wait())
    await asyncio.wait([answering, hurried], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not answering.done():
        await registry.close()  # refuses what waits and ends the workers: that, too, is an answer to each request
    await answering


def _uvicorn_config(app: Any, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=FastLane if sys.platform != "win32" else "auto",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # X-Forwarded-* is not believed
        timeout_graceful_shutdown=settings.drain_timeout + LAST_WORDS,
    )


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers: signals are this module's."""

    def __init__(self, config: uvicorn.Config, sock: socket.socket) -> None:
        super().__init__(config)
        self.sock = sock
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

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


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, list[ModelVersion]]) -> list[ModelVersion] | None:
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


def models_from_settings(settings: Settings) -> list[StartModel]:
    """What the setting `load_models` names: `all`, or `[name=]file` in the model store. Raises SettingError."""
    if not settings.load_models:
        return []
    if settings.model_store is None:
        raise SettingError("load_models is set, but model_store is not: give the directory that holds the archives")
    if [entry.lower() for entry in settings.load_models] == ["all"]:
        files = sorted(path for path in settings.model_store.iterdir() if path.is_dir() or path.name.endswith(ARCHIVE_SUFFIXES))
        return [start_model(path) for path in files]
    return [start_model(settings.model_store / file, name or None) for name, file in map(_split_name, settings.load_models)]


def start_model(path: Path, name: str | None = None) -> StartModel:
    return StartModel(path, RegisterOrder(url=path.name, model_name=name, loaded_at_startup=True))


def _split_name(entry: str) -> tuple[str, str]:
    name, _, file = entry.rpartition("=")
    return name, file
