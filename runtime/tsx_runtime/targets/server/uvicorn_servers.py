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
LAST_ANSWERS_S = 5  # time for clients to read their errors after the drain timeout


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
        protocol = http_protocol()  # It is called once, because it may log a warning.
        self._servers = [
            _Server(app, protocol, settings, listener, tls)
            for app, listener in zip(apps, listeners, strict=True)
        ]
        self._ports = ports
        self._running: dict[_Server, asyncio.Task[None]] = {}
        self._leaving = False

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses by role."""
        http = {
            role: str(server.listener.address)
            for server in self._servers
            for role in server.listener.roles
        }
        return http | {role: port.target for port in self._ports for role in port.roles}

    async def start(self) -> None:
        self._running = {server: asyncio.create_task(server.serve()) for server in self._servers}
        for server, task in self._running.items():
            await _wait_until_listening(server.up, task)
        for port in self._ports:
            await port.server.start()

    def leave(self) -> None:
        """Accept no more connections, because another server has the sockets.

        Open connections may send one more request.
        """
        self._leaving = True
        for server in self._running:
            server.leave()

    async def stop(self, registry: Registry, hurry: asyncio.Event, seconds: float) -> None:
        """Refuse new connections, and return after the last answer.

        Accepted requests are answered within `seconds`, or until `hurry` is set; then they are
        refused. Health checks and metrics are answered until the last prediction is. After `leave`,
        all connections end alike.
        """
        end = time.monotonic() + seconds
        first = [
            server
            for server in self._running
            if self._leaving or "inference" in server.listener.roles
        ]
        last = [server for server in self._running if server not in first]
        calls = [port.server.stop(seconds + LAST_ANSWERS_S) for port in self._ports]
        await self._drain([*self._end(first), *calls], registry, hurry, seconds)
        await self._drain(self._end(last), registry, hurry, max(0.0, end - time.monotonic()))

    def _end(self, servers: Sequence[_Server]) -> list[Awaitable[None]]:
        for server in servers:
            server.listener.leave()
        return [server.end(self._running[server]) for server in servers]

    async def _drain(
        self,
        endings: Sequence[Awaitable[Any]],
        registry: Registry,
        hurry: asyncio.Event,
        timeout: float,
    ) -> None:
        answering = asyncio.gather(*endings)
        hurrying: asyncio.Future[Any] = asyncio.ensure_future(hurry.wait())
        await asyncio.wait(
            [answering, hurrying], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        hurrying.cancel()
        if not answering.done():
            if self._leaving:
                for server in self._running:
                    server.end_connections(after_next=False)
            # This refuses waiting requests and ends the workers, so each request gets an answer.
            await registry.close()
        await answering


async def _wait_until_listening(up: asyncio.Event, running: asyncio.Task[None]) -> None:
    """Wait until the server listens; raise its error if it fails."""
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
        proxy_headers=False,  # X-Forwarded-* is not trusted.
        timeout_graceful_shutdown=settings.drain_timeout + LAST_ANSWERS_S,
    )


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers and its own way to listen.

    `server.py` handles signals, and `listeners.py` makes sockets.
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
        self._accept: Callable[[], asyncio.BaseProtocol] = self._new_connection
        if tls is not None and listener.address.scheme == "https":
            self._accept = TlsListener(tls, self._new_connection, settings.header_timeout)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        server = await asyncio.get_running_loop().create_server(
            self._accept, sock=self.listener.sock, backlog=BACKLOG
        )
        self.servers.append(server)
        self.up.set()

    def leave(self) -> None:
        """Hand the socket over, and end each connection after its next answer."""
        self.listener.hand_over()
        for server in self.servers:
            server.close()
        self.end_connections(after_next=True)

    async def end(self, running: Awaitable[None]) -> None:
        """Stop listening, answer accepted requests and return."""
        if not self.listener.is_handed_over:
            # No connection may arrive after the others have been told to end.
            await self._stop_listening()
        self.should_exit = True
        await running

    async def _stop_listening(self) -> None:
        """Accept the connections in the backlog, which the system would reset; close the socket."""
        loop = asyncio.get_running_loop()
        with contextlib.closing(self.listener.sock.dup()) as listening:
            listening.setblocking(False)
            for server in self.servers:
                server.close()
            await asyncio.sleep(0)  # uvloop closes its descriptor at the end of a turn.
            accepted = []
            with contextlib.suppress(OSError):  # BlockingIOError: the backlog is empty
                while True:
                    accepted.append(listening.accept()[0])
        for connection in accepted:
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # Its client has left.
                await loop.connect_accepted_socket(self._accept, connection)
        await asyncio.sleep(LAST_REQUESTS_S)

    def end_connections(self, *, after_next: bool) -> None:
        """End idle connections, and the others after their current answer.

        With `after_next`, idle connections end only after one more answer.
        """
        self.app.is_replaced = after_next
        for connection in list(self.server_state.connections):
            connection.shutdown()

    def _new_connection(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        connection: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to `server.py`."""
        yield
