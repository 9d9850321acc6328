"""The end of a server, which answers the requests in its backlog."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop

from tests.runtime.http.fast_lane.test_pipelining import EchoApp
from tsx_runtime.http.fast_lane.uvicorn_compat import http_protocol
from tsx_runtime.server.listeners import Listener
from tsx_runtime.server.uvicorn_servers import _Server
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import Settings

REQUEST = b"GET /late HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
LATE_CLIENTS = 20


class ClosingServer:
    """A listening server to which clients connect at the moment when it closes."""

    def __init__(self, server: Any, clients: list[socket.socket]) -> None:
        self._server, self._clients = server, clients
        self.wait_closed = server.wait_closed

    def close(self) -> None:
        for client in self._clients:
            client.connect(self._server.sockets[0].getsockname())
            client.sendall(REQUEST)
        self._clients = []
        self._server.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"]
)
def test_backlogged_connections_of_a_stopping_server_are_answered(loop: Any) -> None:
    async def main() -> list[bytes]:
        settings = Settings()
        listener = Listener(parse_address("http://127.0.0.1:0"), ["inference"])
        listener.listen()
        server = _Server(EchoApp(), http_protocol(), settings, listener, None)
        serve_task = asyncio.create_task(server.serve())
        await server.is_listening.wait()
        with ExitStack() as stack:
            clients = [stack.enter_context(socket.socket()) for _ in range(LATE_CLIENTS)]
            server.servers[:] = [ClosingServer(server.servers[0], clients)]  # type: ignore[list-item]
            await asyncio.wait_for(server.end(serve_task), 60)
            return [client.recv(4096) for client in clients]

    runner = loop()
    try:
        answers = runner.run_until_complete(main())
    finally:
        runner.close()
    assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK"] * LATE_CLIENTS
    assert all(answer.endswith(b"/late 0") for answer in answers)
