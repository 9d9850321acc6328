"""The servers of all addresses, and the order in which they stop."""

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
from tsx_runtime.feature import Port
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.fast_lane.uvicorn_compat import http_protocol
from tsx_runtime.server.listeners import BACKLOG, Listener
from tsx_runtime.server.tls_transport import TlsListener
from tsx_runtime.settings.schema import Settings

LAST_REQUESTS_S = 0.1  # time in which requests on the last connections may still arrive
LAST_ANSWERS_S = 5  # time for clients to read errors after the drain timeout


class ServerGroup:
    """All servers of a process: those of HTTP, and those of features' ports."""

    def __init__(
        self,
        settings: Settings,
        apps: Sequence[ServerApp],
        listeners: Sequence[Listener],
        ports: Sequence[Port],
        tls: ssl.SSLContext | None,
    ) -> None:
        """Create the servers; `apps` has one app for each listener."""
        protocol = http_protocol()  # This is called only once, because it may log a warning.
        self._servers = [
            _Server(app, protocol, settings, listener, tls)
            for app, listener in zip(apps, listeners, strict=True)
        ]
        self._ports = ports
        self._running: dict[_Server, asyncio.Task[None]] = {}
        self._is_replaced = False

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses by role."""
        return {
            role: str(server.listener.address)
            for server in self._servers
            for role in server.listener.roles
        } | {role: port.target for port in self._ports for role in port.roles}

    async def start(self) -> None:
        self._running = {server: asyncio.create_task(server.serve()) for server in self._servers}
        for server, task in self._running.items():
            await _wait_until_listening(server.is_listening, task)
        for port in self._ports:
            await port.start()

    def leave(self) -> None:
        """Accept no more connections, because another server has the sockets.

        Each open connection may send one more request.
        """
        self._is_replaced = True
        for server in self._running:
            server.leave()

    async def stop(self, registry: Registry, stop_now: asyncio.Event, seconds: float) -> None:
        """Refuse new connections, and return after the last answer.

        Requests that are not answered after `seconds`, or when `stop_now` is set, are refused.
        Health checks and metrics are available until the last prediction is answered. After
        `leave`, all servers stop at the same time.
        """
        end = time.monotonic() + seconds
        inference_servers = [
            server
            for server in self._running
            if self._is_replaced or "inference" in server.listener.roles
        ]
        other_servers = [server for server in self._running if server not in inference_servers]
        port_stops = [port.stop(seconds + LAST_ANSWERS_S) for port in self._ports]
        await self._drain([*self._end(inference_servers), *port_stops], registry, stop_now, seconds)
        await self._drain(
            self._end(other_servers), registry, stop_now, max(0.0, end - time.monotonic())
        )

    def _end(self, servers: Sequence[_Server]) -> list[Awaitable[None]]:
        for server in servers:
            server.listener.remove_file()
        return [server.end(self._running[server]) for server in servers]

    async def _drain(
        self,
        server_stops: Sequence[Awaitable[Any]],
        registry: Registry,
        stop_now: asyncio.Event,
        timeout: float,
    ) -> None:
        drain_task = asyncio.gather(*server_stops)
        stop_now_task: asyncio.Future[Any] = asyncio.ensure_future(stop_now.wait())
        await asyncio.wait(
            [drain_task, stop_now_task], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        stop_now_task.cancel()
        try:
            if not drain_task.done():
                if self._is_replaced:
                    for server in self._running:
                        server.end_connections(allow_one_more=False)
                # This refuses waiting requests and ends the workers, so each request gets a
                # response.
                await registry.close()
        finally:
            await drain_task


async def _wait_until_listening(is_listening: asyncio.Event, running: asyncio.Task[None]) -> None:
    """Wait until a server listens; if it fails, raise its error."""
    listening_task = asyncio.create_task(is_listening.wait())
    await asyncio.wait([listening_task, running], return_when=asyncio.FIRST_COMPLETED)
    listening_task.cancel()
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
        proxy_headers=False,  # X-Forwarded-* headers are not trusted.
        timeout_graceful_shutdown=settings.drain_timeout + LAST_ANSWERS_S,
    )


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers and its creation of sockets.

    `stopping.py` handles signals, and `listeners.py` creates sockets.
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
        self.is_listening = asyncio.Event()
        self._accept: Callable[[], asyncio.BaseProtocol] = self._new_connection
        if tls is not None and listener.address.scheme == "https":
            self._accept = TlsListener(tls, self._new_connection, settings.header_timeout)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        server = await asyncio.get_running_loop().create_server(
            self._accept, sock=self.listener.sock, backlog=BACKLOG
        )
        self.servers.append(server)
        self.is_listening.set()

    def leave(self) -> None:
        """Hand the socket over, and close each connection after its next answer."""
        self.listener.hand_over()
        for server in self.servers:
            server.close()
        self.end_connections(allow_one_more=True)

    async def end(self, running: Awaitable[None]) -> None:
        """Stop listening, and return after accepted requests are answered."""
        if not self.listener.is_handed_over:
            # No new connection may be accepted after the existing ones have been told to close.
            await self._stop_listening()
        self.should_exit = True
        await running

    async def _stop_listening(self) -> None:
        """Close the socket, after accepting the backlog's connections; else they would be reset."""
        loop = asyncio.get_running_loop()
        with contextlib.closing(self.listener.sock.dup()) as listening_socket:
            listening_socket.setblocking(False)
            for server in self.servers:
                server.close()
            await asyncio.sleep(0)  # uvloop closes its own descriptor at the end of the turn.
            accepted_sockets = []
            with contextlib.suppress(OSError):  # A BlockingIOError means that the backlog is empty.
                while True:
                    accepted_sockets.append(listening_socket.accept()[0])
        for connection in accepted_sockets:
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # The client has left.
                await loop.connect_accepted_socket(self._accept, connection)
        await asyncio.sleep(LAST_REQUESTS_S)

    def end_connections(self, *, allow_one_more: bool) -> None:
        """Close idle connections at once, and the others after their current answer.

        With `allow_one_more`, idle connections are closed only after one more answer.
        """
        self.app.is_replaced = allow_one_more
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
        """Do nothing, because `stopping.py` handles signals."""
        yield
