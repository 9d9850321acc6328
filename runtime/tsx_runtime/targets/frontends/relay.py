"""The process of a relay: accepts connections, does their TLS, and passes bytes between them and the server.

It knows nothing of HTTP, models and tokens. `frames.py` says what the two tell each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from functools import partial
from typing import cast

from tsx_runtime import wire
from tsx_runtime.targets.frontends.frames import FrameLink, RelayItem, RelayOrders
from tsx_runtime.targets.server.keystore import Pem
from tsx_runtime.targets.server.pem_context import load_pem, server_context
from tsx_runtime.targets.server.tls_transport import TlsListener

TICK = 1.0  # seconds


class ServerLink(FrameLink):
    """This process's end of the socket pair, with all of its connections."""

    def __init__(self, ended: asyncio.Future[None]) -> None:
        super().__init__()
        self.clients: dict[int, RelayedClient] = {}
        self._ended = ended
        self._next = 0
        self._listening: dict[int, asyncio.Server] = {}
        self._begun: asyncio.Task[None]
        self._stopping: set[asyncio.Task[None]] = set()
        self._is_full = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set_result(None)

    def pause_writing(self) -> None:
        self._is_full = True
        for client in self.clients.values():
            client.hold()

    def resume_writing(self) -> None:
        self._is_full = False
        for client in self.clients.values():
            client.release()

    def add(self, client: RelayedClient) -> int:
        self._next += 1
        self.clients[self._next] = client
        if self._is_full:
            client.hold()
        return self._next

    def on_item(self, code: int, number: int, body: wire.Buffer) -> None:
        if code == RelayItem.ORDERS:
            self._begun = self._loop.create_task(self._begin(json.loads(bytes(body))))
        elif code == RelayItem.STOP:
            self._stopping.add(self._loop.create_task(self._stop(number)))
        elif (client := self.clients.get(number)) is None:  # it has ended meanwhile
            pass
        elif code == RelayItem.WRITE:
            client.transport.write(body)
        elif code == RelayItem.CLOSE:
            client.transport.close()
        elif code == RelayItem.ABORT:
            client.transport.abort()
        elif code == RelayItem.HOLD:
            client.hold()
        elif code == RelayItem.RELEASE:
            client.release()

    async def _begin(self, orders: RelayOrders) -> None:
        context = server_context()
        load_pem(context, Pem(orders["certificates"].encode("latin-1"), orders["key"].encode("latin-1")))
        for key, descriptor in orders["listeners"].items():
            number, sock = int(key), socket.socket(fileno=descriptor)
            tls = TlsListener(context, partial(RelayedClient, self, number), orders["handshake_timeout"])
            self._listening[number] = await self._loop.create_server(tls, sock=sock, backlog=orders["backlog"])
        self._tick()
        self.send(RelayItem.READY, 0)

    async def _stop(self, number: int) -> None:
        """Handshakes that are under way are still done: their clients have been accepted."""
        await self._begun
        self._listening.pop(number).close()
        self.send(RelayItem.STOPPED, number)

    def _tick(self) -> None:
        for client in self.clients.values():
            client.tell_unread()
        self._loop.call_later(TICK, self._tick)


class RelayedClient(asyncio.Protocol):
    """A client's connection, once its handshake is done."""

    transport: asyncio.Transport

    def __init__(self, server: ServerLink, listener: int) -> None:
        self._server = server
        self._send = server.send
        self._listener = listener
        self._number = 0
        self._is_full = False
        self._holds = 0  # reasons not to read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        names = [transport.get_extra_info(name) for name in ("peername", "sockname")]
        self._number = self._server.add(self)
        self._send(RelayItem.OPEN, self._number, json.dumps([self._listener, *names]).encode())

    def data_received(self, data: bytes) -> None:
        self._send(RelayItem.DATA, self._number, data)

    def connection_lost(self, exc: Exception | None) -> None:
        del self._server.clients[self._number]
        self._send(RelayItem.LOST, self._number)

    def pause_writing(self) -> None:
        self._is_full = True
        self.tell_unread()

    def resume_writing(self) -> None:
        self._is_full = False
        self._send(RelayItem.UNREAD, self._number, b"0")

    def tell_unread(self) -> None:
        if self._is_full or self.transport.is_closing():
            self._send(RelayItem.UNREAD, self._number, b"%d" % self.transport.get_write_buffer_size())

    def hold(self) -> None:
        self._holds += 1
        if self._holds == 1:
            self.transport.pause_reading()

    def release(self) -> None:
        self._holds -= 1
        if self._holds == 0:
            self.transport.resume_reading()


async def relay(server: socket.socket) -> None:
    """Returns when the server has ended, or lets go of this one."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    server.setblocking(False)
    await loop.connect_accepted_socket(lambda: ServerLink(ended), server)
    await ended


def main() -> None:
    """The argument is the descriptor of this end of the socket pair."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are the server's to heed, and its end is the end of this one
        signal.signal(number, signal.SIG_IGN)
    import uvloop  # here, because it does not exist for Windows

    uvloop.run(relay(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # nothing is left to be finished
