"""The server's side of the relays: starts them, and has their connections as if it had accepted them itself."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import Any

from tsx_runtime import wire
from tsx_runtime.core.isolation.hidden_credentials import hidden_variables
from tsx_runtime.errors import SettingError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.safe_path import CLEAN
from tsx_runtime.targets.frontends.frames import FrameLink, RelayItem, RelayOrders
from tsx_runtime.targets.frontends.relayed_transport import RelayedTransport
from tsx_runtime.targets.server.listeners import Listener
from tsx_runtime.targets.server.tls import read_pem

PROGRAM = f"{CLEAN}from tsx_runtime.targets.frontends.relay import main; main()"
PAUSES = (0.1, 1, 2, 5, 10, 30)  # seconds between the death of a relay and the next one; the last one repeats
STEADY = 60.0  # seconds after which a relay that dies is followed by the next one as quickly as at first
START = 60.0  # seconds in which a relay is to be ready
PATIENCE = 5.0  # seconds for a relay that is to stop

logger = logging.getLogger("tsx.server")

NewProtocol = Callable[[], asyncio.Protocol]


class RelayLink(FrameLink):
    """This process's end of a relay's socket pair, with the connections that it has accepted."""

    def __init__(self, served: dict[int, NewProtocol], process: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self.connections: dict[int, RelayedTransport] = {}
        self.process = process
        self.ready: asyncio.Future[bool] = self._loop.create_future()
        self.ended = asyncio.Event()
        self.is_full = False  # more waits to be sent over the pair than may
        self._served = served
        self._stopped: dict[int, asyncio.Future[None]] = {}

    def on_item(self, code: int, number: int, body: wire.Buffer) -> None:
        if code == RelayItem.OPEN:
            self._open(number, *json.loads(bytes(body)))
        elif code == RelayItem.STOPPED:
            _resolve(self._stopped[number])
        elif code == RelayItem.READY:
            self.ready.set_result(True)
        elif (connection := self.connections.get(number)) is None:  # it was aborted
            pass
        elif code == RelayItem.DATA:
            connection.received(body if type(body) is bytes else bytes(body))
        elif code == RelayItem.LOST:
            connection.lost(None)
        elif code == RelayItem.FULL:
            connection.tell_unread(int(bytes(body)), is_full=True)
        elif code == RelayItem.EMPTY:
            connection.tell_unread(0, is_full=False)

    def _open(self, number: int, listener: int, client: list[Any] | None, server: list[Any] | None) -> None:
        # Of an IPv6 address host and port alone: uvicorn takes no others.
        extra = {"peername": client and tuple(client[:2]), "sockname": server and tuple(server[:2]), "sslcontext": True}
        self.connections[number] = connection = RelayedTransport(self, number, extra)
        connection.begin(self._served[listener]())

    def stop(self, listener: int) -> asyncio.Future[None]:
        """Done once no further connection of the listener comes."""
        if listener not in self._stopped:
            self._stopped[listener] = self._loop.create_future()
            if self.ended.is_set():
                _resolve(self._stopped[listener])
            else:
                self.send(RelayItem.STOP, listener)
        return self._stopped[listener]

    def pause_writing(self) -> None:
        self.is_full = True
        for connection in list(self.connections.values()):
            connection.update_flow()

    def resume_writing(self) -> None:
        self.is_full = False
        for connection in list(self.connections.values()):
            connection.update_flow()

    def connection_lost(self, exc: Exception | None) -> None:
        for connection in list(self.connections.values()):
            connection.lost(ConnectionResetError("the relay of this connection has ended"))
        for stopped in self._stopped.values():
            _resolve(stopped)
        if not self.ready.done():
            self.ready.set_result(False)
        self.ended.set()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class RelayedServer(asyncio.AbstractServer):
    """A listener whose connections the relays accept, in place of the event loop's own."""

    def __init__(self, relays: Relays, number: int) -> None:
        self._relays = relays
        self._number = number

    def close(self) -> None:
        self._relays.stop(self._number)

    async def wait_closed(self) -> None:
        """Until all connections that were accepted there are known."""
        await self._relays.stopped(self._number)


class Relays:
    """The relays of a server."""

    def __init__(self, settings: Settings, listeners: Sequence[Listener]) -> None:
        """`listeners` are those of https. Raises SettingError."""
        if sys.platform == "win32":
            raise SettingError(f"frontends is {settings.frontends}, but Windows has no processes that share a socket: leave it at 1")
        self._settings = settings
        self._listeners = listeners
        key, certificates = read_pem(settings, f"{listeners[0].roles[0]}_address")
        self._pair = certificates.decode("latin-1"), key.decode("latin-1")
        self._served: dict[int, NewProtocol] = {}
        self._links: set[RelayLink] = set()
        self._stopping: dict[int, list[asyncio.Future[None]]] = {}
        self._supervisors: list[asyncio.Task[None]] = []

    def serve(self, listener: Listener, new_protocol: NewProtocol) -> RelayedServer:
        number = self._listeners.index(listener)
        self._served[number] = new_protocol
        return RelayedServer(self, number)

    async def start(self) -> None:
        """Once all listeners are served. Returns when the relays accept connections. Raises SettingError."""
        try:
            links = [await self._spawn() for _ in range(self._settings.frontends)]
        except OSError as error:
            raise self._not_started(str(error)) from error
        ready, late = await asyncio.wait([link.ready for link in links], timeout=START)
        if late or not all(each.result() for each in ready):
            raise self._not_started("its error is above" if not late else f"it was not ready within {START:g} s")
        self._supervisors = [asyncio.create_task(self._supervise(link)) for link in links]

    def _not_started(self, why: str) -> SettingError:
        return SettingError(
            f"frontends is {self._settings.frontends}, but one of them did not start: {why}. 1 does without such processes."
        )

    async def _spawn(self) -> RelayLink:
        """Raises OSError."""
        listening = {str(number): each.sock.fileno() for number, each in enumerate(self._listeners) if number not in self._stopping}
        process, ours = self._start_process(listening.values())
        loop = asyncio.get_running_loop()
        _, link = await loop.connect_accepted_socket(lambda: RelayLink(self._served, process), ours)
        self._links.add(link)
        certificates, key = self._pair
        timeout = self._settings.header_timeout
        orders: RelayOrders = {"listeners": listening, "handshake_timeout": timeout, "certificates": certificates, "key": key}
        link.send(RelayItem.ORDERS, 0, json.dumps(orders).encode())
        for number in self._stopping:
            if str(number) in listening:  # meanwhile
                link.stop(number)
        return link

    def _start_process(self, descriptors: Collection[int]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process, and this one's end of the socket pair. Raises OSError."""
        hidden = hidden_variables(self._settings, os.environ)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                    env={name: value for name, value in os.environ.items() if name not in hidden},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *descriptors],
                    start_new_session=True,  # a terminal's Ctrl-C is the server's alone
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        return process, ours

    async def _supervise(self, link: RelayLink) -> None:
        """A relay, and those that follow it."""
        pauses = iter(PAUSES)
        while True:
            begun = monotonic()
            await link.ended.wait()
            code = await self._reap(link)
            if monotonic() - begun > STEADY:
                pauses = iter(PAUSES)
            pause = next(pauses, PAUSES[-1])
            logger.error("a relay ended (exit code %d), and its connections with it; another one starts in %g s", code, pause)
            await asyncio.sleep(pause)
            while len(self._stopping) < len(self._listeners):
                try:
                    link = await self._spawn()
                    break
                except OSError as error:
                    pause = next(pauses, PAUSES[-1])
                    logger.error("a relay cannot be started; tried again in %g s: %s", pause, error)
                    await asyncio.sleep(pause)
            else:
                return

    async def _reap(self, link: RelayLink) -> int:
        self._links.discard(link)
        try:
            return await asyncio.to_thread(link.process.wait, PATIENCE)
        except subprocess.TimeoutExpired:  # it has closed the pair, and does not end
            link.process.kill()
            return await asyncio.to_thread(link.process.wait)

    def stop(self, number: int) -> None:
        """Accept no more connections of this listener."""
        if number not in self._stopping:
            self._stopping[number] = [link.stop(number) for link in self._links]
            self._listeners[number].sock.close()  # relays, and a server that replaces this one, have their own descriptors of it

    async def stopped(self, number: int) -> None:
        if waiting := self._stopping.get(number):
            await asyncio.wait(waiting, timeout=PATIENCE)

    async def close(self) -> None:
        """The relays end, and what connections they have."""
        for task in self._supervisors:
            task.cancel()
        for link in self._links:
            link.transport.close()
        await asyncio.gather(*(self._reap(link) for link in list(self._links)))
