"""A WebSocket connection: uvicorn's, within the limits of this server's other connections, and with an end that waits for the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.server import ServerProtocol

from tsx_runtime.errors import NoRoom
from tsx_runtime.http.semantics.messages import CLIENT_LEFT, MOST_PIECES, CountedBytes
from tsx_runtime.http.websocket.limits import SocketLimits

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState

OnLost: TypeAlias = "Callable[[Exception | None], None]"
RESTART, TRY_AGAIN, TOO_SLOW = 1012, 1013, 1008  # close codes (RFC 6455, and IANA's registry of them)

logger = logging.getLogger("tsx.http")


class WebSocketConnection(WebSocketsSansIOProtocol):
    """Reads one message ahead. Bytes that wait, to be read here or by the client, count against `max_inflight_bytes`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: SocketLimits,
        on_lost: Callable[[Exception | None], None],
    ) -> None:
        """`on_lost` ends the connection that this one was made of."""
        super().__init__(config, server_state, app_state)
        self.conn = ServerProtocol(max_size=limits.max_size, logger=logger)
        self._limits, self._on_lost = limits, on_lost
        self._left = asyncio.Event()
        self._counted = CountedBytes(limits.bytes_in_flight)
        self._size = 0  # bytes of a message that is not complete
        self._ticks = 0  # seconds since it began
        self._unsent = self._stuck = 0  # bytes that the client had not taken at the last tick, and for how many ticks it takes none
        self._idle = self._leaving = False

    # What the event loop calls

    def data_received(self, data: bytes) -> None:
        try:
            self._counted.grow_to(self._size + len(data))
        except NoRoom as error:
            self._fail(TRY_AGAIN, error.message)
            return
        super().data_received(data)
        if len(self.frames) > MOST_PIECES:
            self.frames = [b"".join(self.frames)]
        self._size = len(self.frames) + sum(map(len, self.frames)) + len(self.conn.reader.buffer)
        if not self._size or self.read_paused:  # the last one is complete
            self._ticks = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._left.set()
        self._counted.give_back()
        self._limits.bytes_in_flight.set_unread(self, 0)
        super().connection_lost(exc)
        self._on_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._count_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._count_unread(0)

    def shutdown(self) -> None:
        """uvicorn's word that the server stops: at once where no answer is under way, else behind it."""
        self._leaving = True
        if self._idle or not self.handshake_complete:
            super().shutdown()

    # What the application gets

    async def run_asgi(self) -> None:
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]  # a TypedDict, which takes further keys all the same
        scope[CLIENT_LEFT] = self._left
        await super().run_asgi()

    async def receive(self) -> Any:
        if self._leaving:
            super().shutdown()
            return {"type": "websocket.disconnect", "code": RESTART}
        self._idle = True
        message = await super().receive()
        self._idle = False
        self._counted.give_back()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # which uvicorn misses in its log

    def handle_close(self, event: Any) -> None:
        self._left.set()
        super().handle_close(event)

    # Limits

    def on_tick(self) -> None:
        """A second has passed (see `connection_clock.py`)."""
        limits, unsent = self._limits, self.transport.get_write_buffer_size()
        self._stuck = self._stuck + 1 if unsent and unsent >= self._unsent else 0
        self._unsent = unsent
        self._count_unread(unsent)  # answers to pings are no answers that wait until the client reads
        if self._stuck > limits.write:
            self.transport.abort()
        elif self._size and not self.read_paused:
            self._ticks += 1
            if self._ticks > limits.body + self._size / limits.body_rate:
                self._fail(TOO_SLOW, f"The message came too slowly: {self._size} bytes in {self._ticks} s (body_timeout).")

    def keepalive_timeout(self) -> None:
        if self._size:  # a client that sends one large frame answers no ping within it
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    def cut_off(self) -> None:
        """The client has too much to read, and the budget is used up."""
        self.transport.abort()

    def _count_unread(self, size: int) -> None:
        budget = self._limits.bytes_in_flight
        budget.set_unread(self, size)
        if budget.overdrawn:
            self.loop.call_soon(budget.shed)  # not here, within a write

    def _fail(self, code: int, reason: str) -> None:
        self.conn.fail(code, reason.encode()[:120].decode(errors="ignore"))  # of a control frame's 125 bytes two are the code
        self.handle_parser_exception()
