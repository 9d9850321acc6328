"""A WebSocket connection: the protocol of the package `websockets` as an ASGI server, within the
limits of this server's other connections.

`asgi_lane/websockets.py` says what the messages are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from websockets.datastructures import Headers
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from tsx_runtime.api.messages import CLIENT_LEFT, CountedBytes, Message, Receive, Scope, Send
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.errors import BadRequest, NoRoom
from tsx_runtime.http.connection_clock import Timeouts
from tsx_runtime.http.turns import LARGE, Turns

if TYPE_CHECKING:
    from uvicorn.server import ServerState

SUBPROTOCOL = "tsx.v1"
INVALID, POLICY, FAILED, RESTART, TRY_AGAIN = (
    1007,
    1008,
    1011,
    1012,
    1013,
)  # close codes (RFC 6455, and IANA's registry of them)
LONGEST_REASON = 120  # bytes, of a control frame's 125
AHEAD = (
    64 << 10
    # bytes that a client may send ahead of the message that it waits for before it is no longer
    # read from
)
OVERHEAD = 1024  # bytes that a message counts for besides its own
FRAMES_PER_TURN = 16  # frames parsed before other connections have their turn, in about 15 µs each
MAX_IDLE_FRAMES = 100  # pings, pongs and empty fragments of one second
MAX_FRAGMENTS = 1024  # fragments of a message, besides one for each KiB of it
HOLD_S = 1.0  # time in which a client that broke a limit can read why, and cannot come again
LENGTH_BYTES = {126: 2, 127: 8}  # of a frame's extended length (RFC 6455, 5.2)
MASK_BYTES = 4  # of each frame of a client
SILENCE = (
    20  # seconds after which a client gets a ping, and after as many again without a word is gone
)

logger = logging.getLogger("tsx.http")
quiet = logging.getLogger("tsx.http.websocket")  # the package's own, which tells of each connection
quiet.setLevel(logging.WARNING)


class WebSocketConnection(asyncio.Protocol):
    """Reads ahead, within bounds, so that it notices a client that leaves.

    Bytes that wait, to be read here or by the client, count
    against `max_inflight_bytes`.
    """

    def __init__(
        self,
        head: bytes,
        server_state: ServerState,
        max_size: int,
        bytes_in_flight: ByteBudget,
        timeouts: Timeouts,
        turns: Turns,
        on_lost: Callable[[Exception | None], None],
    ) -> None:
        """`head` is the request that asks for the upgrade.

        `on_lost` is called once the connection is closed. Raises BadRequest if `head`
        is no handshake.
        """
        self._protocol = ServerProtocol(max_size=max_size, select_subprotocol=_choose, logger=quiet)
        self._protocol.receive_data(head)
        events = self._protocol.events_received()
        self._response = self._protocol.accept(cast("Request", events[0])) if events else None
        if self._response is None or self._response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            error = self._protocol.handshake_exc
            raise BadRequest(
                f"This is no handshake of a WebSocket: {error and (error.__cause__ or error)}."
            )
        self._connections, self._tasks = server_state.connections, server_state.tasks
        self._budget, self._timeouts, self._turns, self._on_lost = (
            bytes_in_flight,
            timeouts,
            turns,
            on_lost,
        )
        self._counted = CountedBytes(bytes_in_flight)
        self._ahead = bytearray()  # not parsed yet
        self._frame_missing = 0  # bytes of the present frame that are not parsed yet
        self._fragments = 0  # frames of the present message
        self._idle_frames = 0  # pings, pongs and empty fragments of this second
        self._message = bytearray()  # the frames of one that is not complete
        self._partial = 0  # bytes of it, those of the present frame included
        self._is_text = False
        self._messages: deque[bytes | str] = deque()  # complete ones
        self._waiting = 0  # bytes of them
        self._news, self._left, self._writable = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._writable.set()
        self._paused = self._leaving = self._held_open = self._has_turn = False
        self._ticks = 0  # seconds since the incomplete message began
        self._silence = 0  # seconds in which nothing has come
        self._unsent = self._stuck = (
            # bytes that the client had not taken at the last tick, and for how many ticks it takes
            # none
            0
        )

    def start(
        self,
        transport: asyncio.Transport,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        scope: Scope,
    ) -> None:
        self.transport = transport
        transport.set_protocol(self)
        self._connections.add(cast("Any", self))
        task = asyncio.get_running_loop().create_task(
            self._run(app, {**scope, "type": "websocket", CLIENT_LEFT: self._left})
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], scope: Scope
    ) -> None:
        try:
            await app(scope, self.receive, self.send)
        except OSError:  # the client has left
            pass
        except Exception:  # the boundary of a connection
            logger.exception("a WebSocket connection ends, because the server failed")
            self._fail(FAILED, "The server failed; its log says why.")
        if self._leaving:
            self._fail(RESTART, "The server stops.")
        if not self._held_open:
            self.transport.close()

    # What the event loop and uvicorn's server call

    def data_received(self, data: bytes) -> None:
        if self._held_open:
            return
        self._silence = 0
        self._ahead += data
        try:
            self._counted.grow_to(self._held)
        except NoRoom as error:
            self._fail(TRY_AGAIN, error.message)
            return
        if not self._has_turn:
            self._parse()
        if len(data) > LARGE:
            self._take_turn()  # Otherwise the event loop would read on in this turn.
        self._update_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        for event in (self._left, self._news, self._writable):
            event.set()
        self._counted.give_back()
        self._budget.set_unread(self, 0)
        self._connections.discard(cast("Any", self))
        self._on_lost(exc)

    def pause_writing(self) -> None:
        self._writable.clear()
        self._count_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._writable.set()
        self._count_unread(0)

    def shutdown(self) -> None:
        """The server stops: the answer that is under way is the last."""
        self._leaving = True
        self._news.set()

    def on_tick(self) -> None:
        """A second has passed (see `connection_clock.py`)."""
        timeouts, unsent = self._timeouts, self.transport.get_write_buffer_size()
        self._idle_frames = 0
        self._stuck = self._stuck + 1 if unsent and unsent >= self._unsent else 0
        self._unsent = unsent
        self._count_unread(
            unsent
        )  # answers to pings are no answers that wait until the client reads
        if self._stuck > timeouts.write:
            self.transport.abort()
        if self._paused or unsent or self._protocol.state is not State.OPEN:
            self._silence = 0  # the client's word is not read, or it has no reason to say one
            return
        self._silence += 1
        if self._silence == SILENCE:
            self._protocol.send_ping(b"")
            self._write()
        elif self._silence > 2 * SILENCE:
            self._fail(FAILED, f"Nothing has come for {self._silence} s, and no answer to a ping.")
        if self._partial:
            self._ticks += 1
            if self._ticks > timeouts.body + self._partial / timeouts.body_rate:
                self._fail(
                    POLICY,
                    f"The message came too slowly: {self._partial} bytes in {self._ticks} s"
                    " (body_timeout).",
                )

    def cut_off(self) -> None:
        """The client has too much to read, and the budget is used up."""
        self.transport.abort()

    # What the application gets

    async def receive(self) -> Message:
        """Return the next message, each in a turn of its own, or a disconnect."""
        while not (
            (self._news.is_set() and self._messages) or self._left.is_set() or self._leaving
        ):
            self._news.clear()
            await self._news.wait()
        if self._left.is_set() or self._leaving:
            return {"type": "websocket.disconnect"}
        message = self._messages.popleft()
        self._waiting -= len(message) + OVERHEAD
        self._counted.shrink_to(self._held)
        if self._messages or self._ahead or self._paused:
            self._news.clear()
            self._take_turn()
        return {
            "type": "websocket.receive",
            "text" if isinstance(message, str) else "bytes": message,
        }

    async def send(self, message: Message) -> None:
        """Raises OSError where the client has left."""
        await self._writable.wait()
        if self._left.is_set():
            raise ConnectionResetError
        try:
            if message["type"] == "websocket.accept":
                self._protocol.send_response(cast("Response", self._response))
            elif message["type"] == "websocket.refuse":
                headers = Headers(
                    [
                        (name.decode("latin-1"), value.decode("latin-1"))
                        for name, value in message["headers"]
                    ]
                )
                status = HTTPStatus(message["status"])
                self._protocol.send_response(
                    Response(status, status.phrase, headers, message["body"])
                )
            elif "bytes" in message:
                self._protocol.send_binary(message["bytes"])
            else:
                self._protocol.send_text(message["text"].encode())
        except InvalidState as error:
            raise ConnectionResetError from error
        self._write()

    # The protocol

    @property
    def _held(self) -> int:
        """Bytes that have come, and that the application has not got."""
        return len(self._ahead) + self._partial + self._waiting

    @property
    def _has_enough(self) -> bool:
        return bool(self._messages) and self._held > AHEAD

    def _parse(self) -> None:
        """Parse a turn's share of what has come, until enough messages wait."""
        ahead, protocol = self._ahead, self._protocol
        for _ in range(FRAMES_PER_TURN):
            size = 0 if self._has_enough else self._next_size()
            if not size or protocol.state in (State.CLOSING, State.CLOSED):
                break
            protocol.receive_data(bytes(memoryview(ahead)[:size]))
            del ahead[:size]
            self._frame_missing -= size
            frames = cast("list[Frame]", protocol.events_received())
            for frame in frames:
                self._add(frame)
            self._partial = len(self._message) if frames else self._partial + size
        else:
            self._take_turn()
        self._write()

    def _next_size(self) -> int:
        """Return how many bytes of one frame the parser gets next; 0 before its length has come."""
        ahead = self._ahead
        if not self._frame_missing and len(ahead) > 1:
            size = ahead[1] & 0x7F
            begin = 2 + LENGTH_BYTES.get(size, 0)
            if len(ahead) >= begin:
                self._frame_missing = (
                    begin
                    + MASK_BYTES
                    + (int.from_bytes(ahead[2:begin], "big") if begin > 2 else size)
                )
        return min(self._frame_missing, len(ahead))

    def _take_turn(self) -> None:
        """Go on in another turn of the event loop, after the other connections."""
        if not self._has_turn:
            self._has_turn = True
            self._turns.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._has_turn = False
        if not self.transport.is_closing():
            self._parse()
            self._update_reading()
            if self._messages:
                self._news.set()

    def _update_reading(self) -> None:
        """Read from the client while all that has come is parsed, and few messages wait."""
        pauses = self._has_enough or self._has_turn or self._held_open
        if pauses is not self._paused and not self.transport.is_closing():
            self._paused = pauses
            (self.transport.pause_reading if pauses else self.transport.resume_reading)()

    def _add(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self._left.set()
        is_control = frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
        if is_control or not (frame.data or frame.fin):
            self._idle_frames += 1
            if self._idle_frames > MAX_IDLE_FRAMES:
                self._refuse(
                    f"At most {MAX_IDLE_FRAMES} pings, pongs and empty fragments a second are"
                    " taken."
                )
        if is_control:
            self._news.set()
            return
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._message += frame.data
        self._fragments += 1
        if self._fragments > MAX_FRAGMENTS + (len(self._message) >> 10):
            self._refuse(
                f"A message has at most {MAX_FRAGMENTS} fragments, and one more for each KiB."
            )
        if frame.fin:
            self._fragments = 0
            try:
                self._messages.append(
                    self._message.decode() if self._is_text else bytes(self._message)
                )
            except UnicodeDecodeError:
                self._fail(INVALID, "The text is not UTF-8.")
                return
            self._waiting += len(self._messages[-1]) + OVERHEAD
            self._message.clear()
            self._ticks = 0
            self._news.set()

    def _write(self) -> None:
        for data in self._protocol.data_to_send():
            if data and not self.transport.is_closing():
                self.transport.write(data)
            elif not data and not self._held_open:  # the end
                self.transport.close()

    def _count_unread(self, size: int) -> None:
        self._budget.set_unread(self, size)
        if self._budget.overdrawn:
            asyncio.get_running_loop().call_soon(self._budget.shed)  # not here, within a write

    def _refuse(self, reason: str) -> None:
        """Tell a client that broke a limit, read nothing more from it, and close after `HOLD_S`."""
        if not self._held_open:
            self._held_open = True
            self._fail(POLICY, reason)
            self._left.set()
            asyncio.get_running_loop().call_later(HOLD_S, self.transport.close)

    def _fail(self, code: int, reason: str) -> None:
        self._protocol.fail(code, reason.encode()[:LONGEST_REASON].decode(errors="ignore"))
        self._write()


def _choose(protocol: ServerProtocol, offered: Any) -> Subprotocol | None:
    return Subprotocol(SUBPROTOCOL) if SUBPROTOCOL in offered else None
