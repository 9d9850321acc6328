"""The uvicorn and gRPC servers of the bound addresses: their start, and the order of their stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

import uvicorn

from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.fast_lane.uvicorn_compat import http_protocol
from tsx_runtime.settings.schema import Settings
from tsx_runtime.targets.server.grpc_listeners import Port
from tsx_runtime.targets.server.listeners import BACKLOG, Listener
from tsx_runtime.targets.server.tls_transport import TlsListener

LAST_REQUESTS_S = 0.1  # time in which requests on the last connections still arrive
LAST_WORDS = 5  # seconds that clients may take to read their errors once the time to drain is over


class ServerGroup:
    """All servers of a process, from the first connection to the last answer."""

    def __init__(
        self,
        settings: Settings,
        apps: Sequence[ServerApp],
        listeners: Sequence[Listener],
        ports: Sequence[Port],
        tls: ssl.SSLContext | None,
    ) -> None:
        """`apps` has one app for each listener."""
        protocol = http_protocol()  # once: it may have a warning to log
        self._servers = [
            _Server(app, protocol, settings, listener, tls)
            for app, listener in zip(apps, listeners, strict=True)
        ]
        self._ports = ports
        self._running: dict[_Server, asyncio.Task[None]] = {}
        self._leaving = False

    @property
    def addresses(self) -> dict[str, str]:
        """By role."""
        http = {
            role: str(server.listener.address)
            for server in self._servers
            for role in server.listener.roles
        }
        return http | {role: port.target for port in self._ports for role in port.roles}

    async def start(self) -> None:
        self._running = {server: asyncio.create_task(server.serve()) for server in self._servers}
        for server, task in self._running.items():
            await _listening(server.up, task)
        for port in self._ports:
            await port.server.start()

    def leave(self) -> None:
        """Accept no more connections: another server has the sockets.

        Those that are there may send one more request.
        """
        self._leaving = True
        for server in self._running:
            server.leave()

    async def stop(self, registry: Registry, hurry: asyncio.Event, seconds: float) -> None:
        """Refuse new connections.

        Accepted requests are answered within `seconds`, or until `hurry` is set; then they are
        refused.

        Health checks and metrics are answered until the last prediction is. After `leave`, all
        connections end alike.
        """
        end = time.monotonic() + seconds
        predicting = [
            server
            for server in self._running
            if self._leaving or "inference" in server.listener.roles
        ]
        others = [server for server in self._running if server not in predicting]
        calls = [port.server.stop(seconds + LAST_WORDS) for port in self._ports]
        await self._drain([*self._end(predicting), *calls], registry, hurry, seconds)
        await self._drain(self._end(others), registry, hurry, max(0.0, end - time.monotonic()))

    def _end(self, servers: Sequence[_Server]) -> list[Awaitable[None]]:
        for server in servers:
            server.listener.leave()
        return [server.end(self._running[server]) for server in servers]

    async def _drain(
        self,
        ending: Sequence[Awaitable[Any]],
        registry: Registry,
        hurry: asyncio.Event,
        timeout: float,
    ) -> None:
        answering = asyncio.gather(*ending)
        hurried: asyncio.Future[Any] = asyncio.ensure_future(hurry.wait())
        await asyncio.wait(
            [answering, hurried], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        hurried.cancel()
        if not answering.done():
            if self._leaving:
                for server in self._running:
                    server.end_connections(after_next=False)
            # Refuses waiting requests and ends the workers, so each request gets an answer.
            await registry.close()
        await answering


async def _listening(up: asyncio.Event, running: asyncio.Task[None]) -> None:
    """Wait until the server listens. Raises its error."""
    waiting = asyncio.create_task(up.wait())
    await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        running.result()


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
        proxy_headers=False,  # X-Forwarded-* is not trusted
        timeout_graceful_shutdown=settings.drain_timeout + LAST_WORDS,
    )


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers and its way to listen: signals are
    `server.py`'s, sockets `listeners.py`'s.
    """

    def __init__(
        self,
        app: Any,
        http: Any,
        settings: Settings,
        listener: Listener,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(_uvicorn_config(app, http, settings))
        self.app = app
        self.listener = listener
        self.up = asyncio.Event()
        self._accept: Callable[[], asyncio.BaseProtocol] = self._connection
        if tls is not None and listener.address.scheme == "https":
            self._accept = TlsListener(tls, self._connection, settings.header_timeout)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        server = await asyncio.get_running_loop().create_server(
            self._accept, sock=self.listener.sock, backlog=BACKLOG
        )
        self.servers.append(server)
        self.up.set()

    def leave(self) -> None:
        self.listener.hand_over()
        for server in self.servers:
            server.close()
        self.end_connections(after_next=True)

    async def end(self, running: Awaitable[None]) -> None:
        if not self.listener.is_handed_over:
            # Before the connections are told: none may come behind that.
            await self._stop_listening()
        self.should_exit = True
        await running

    async def _stop_listening(self) -> None:
        """Accept what waits in the backlog, which the system would reset, then close the socket."""
        loop = asyncio.get_running_loop()
        with contextlib.closing(self.listener.sock.dup()) as listening:
            listening.setblocking(False)
            for server in self.servers:
                server.close()
            await asyncio.sleep(0)  # uvloop closes its descriptor at the end of a turn
            accepted = []
            with contextlib.suppress(OSError):  # BlockingIOError: no more
                while True:
                    accepted.append(listening.accept()[0])
        for connection in accepted:
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # its client has left
                await loop.connect_accepted_socket(self._accept, connection)
        await asyncio.sleep(LAST_REQUESTS_S)

    def end_connections(self, *, after_next: bool) -> None:
        """Those that wait for nothing end now, or after their next answer; the others with the
        present one.
        """
        self.app.leaving = after_next
        for connection in list(self.server_state.connections):
            connection.shutdown()

    def _connection(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        made: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
