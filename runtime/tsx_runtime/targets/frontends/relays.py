"""Starts the relays of a server, follows those that die with others, and stops them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from time import monotonic

from tsx_runtime.core.isolation.hidden_credentials import hidden_variables
from tsx_runtime.errors import SettingError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.safe_path import CLEAN
from tsx_runtime.targets.frontends.frames import RelayItem, RelayOrders
from tsx_runtime.targets.frontends.relayed import NewProtocol, RelayLink
from tsx_runtime.targets.server.listeners import BACKLOG, Listener
from tsx_runtime.targets.server.tls import read_pem

PROGRAM = f"{CLEAN}from tsx_runtime.targets.frontends.relay import main; main()"
PAUSES = (0.1, 1, 2, 5, 10, 30)  # seconds between the death of a relay and the next one; the last one repeats
STEADY = 60.0  # seconds after which a relay that dies is followed by the next one as quickly as at first
START = 60.0  # seconds in which a relay is to be ready
PATIENCE = 5.0  # seconds in which it is to accept no more connections

logger = logging.getLogger("tsx.server")


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

    def serve(self, listener: Listener, new_protocol: NewProtocol) -> None:
        self._served[self._listeners.index(listener)] = new_protocol

    async def start(self) -> None:
        """Once all listeners are served. Returns when the relays accept connections. Raises SettingError."""
        try:
            links = [await self._spawn() for _ in range(self._settings.frontends)]
            ready, late = await asyncio.wait([link.ready for link in links], timeout=START)
            if late or not all(each.result() for each in ready):
                raise ChildProcessError("it was not ready within a minute" if late else "it ended, for the reason above")
        except OSError as error:
            text = f"frontends is {self._settings.frontends}, but a relay could not be started: {error}. With 1 there are no relays."
            raise SettingError(text) from error
        self._supervisors = [asyncio.create_task(self._supervise(link)) for link in links]

    async def _spawn(self) -> RelayLink:
        """Raises OSError."""
        listening = {str(number): each.sock.fileno() for number, each in enumerate(self._listeners) if number not in self._stopping}
        process, ours = self._start_process(listening.values())
        loop = asyncio.get_running_loop()
        _, link = await loop.connect_accepted_socket(lambda: RelayLink(self._served, process), ours)
        self._links.add(link)
        certificates, key = self._pair
        timeout = self._settings.header_timeout
        orders = RelayOrders(listeners=listening, backlog=BACKLOG, handshake_timeout=timeout, certificates=certificates, key=key)
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

    async def _supervise(self, link: RelayLink | None) -> None:
        """A relay, and those that follow it."""
        begun, pauses, why = monotonic(), iter(PAUSES), ""
        while True:
            if link is not None:
                await link.ended.wait()
                why = f"a relay ended (exit code {await self._reap(link)}), and its connections with it"
                if monotonic() - begun > STEADY:
                    pauses = iter(PAUSES)
            pause = next(pauses, PAUSES[-1])
            logger.error("%s; another one starts in %g s", why, pause)
            await asyncio.sleep(pause)
            if len(self._stopping) == len(self._listeners):
                return
            begun, link = monotonic(), None
            try:
                link = await self._spawn()
            except OSError as error:
                why = f"a relay cannot be started: {error}"

    async def _reap(self, link: RelayLink) -> int:
        self._links.discard(link)
        link.process.kill()
        return await asyncio.to_thread(link.process.wait)

    async def stop(self, listener: Listener) -> None:
        """Accept no more connections of this listener. Returns once all that were accepted are known."""
        number = self._listeners.index(listener)
        if number not in self._stopping:
            self._stopping[number] = [link.stop(number) for link in self._links]
            listener.sock.close()  # relays, and a server that replaces this one, have their own descriptors of it
        if waiting := self._stopping[number]:
            await asyncio.wait(waiting, timeout=PATIENCE)

    async def close(self) -> None:
        """The relays end, and what connections they have."""
        for task in self._supervisors:
            task.cancel()
        for link in list(self._links):
            link.transport.abort()
            await self._reap(link)
