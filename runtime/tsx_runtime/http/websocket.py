"""A WebSocket connection, which runs an ASGI app and uses the package `websockets`.

It has the same limits as this server's other connections. `asgi_lane/websockets.py` describes the
messages.
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
from tsx_runtime.http.turns import LARGE_READ_BYTES, Turns

if TYPE_CHECKING:
    from uvicorn.server import ServerState

SUBPROTOCOL = "tsx.v1"
# close codes of RFC 6455 and IANA's registry
INVALID, POLICY, FAILED, RESTART, TRY_AGAIN = 1007, 1008, 1011, 1012, 1013
MAX_REASON_BYTES = 120  # A control frame has room for 125 bytes.
# Reading pauses if a client has sent more bytes before its current message is answered.
MAX_AHEAD_BYTES = 64 << 10
MESSAGE_OVERHEAD_BYTES = 1024  # memory of a waiting message in addition to its content
FRAMES_PER_TURN = 16  # frames that are parsed in one turn, in about 15 µs each
MAX_IDLE_FRAMES = 100  # pings, pongs and empty fragments per second
MAX_FRAGMENTS = 1024  # fragments of a message, in addition to one for each KiB of it
# time for which a client that exceeded a limit stays connected, to read the reason
REFUSAL_HOLD_S = 1.0
LENGTH_BYTES = {126: 2, 127: 8}  # size of a frame's extended length (RFC 6455, section 5.2)
MASK_BYTES = 4  # size of the mask in a client's frame
PING_AFTER_S = (
    20  # A client that sends nothing gets a ping, and is disconnected after the same time again.
)

logger = logging.getLogger("tsx.http")
# `websockets` logs each connection to this logger at a lower level.
package_logger = logging.getLogger("tsx.http.websocket")
package_logger.setLevel(logging.WARNING)


class WebSocketConnection(asyncio.Protocol):
    """A WebSocket connection that reads ahead up to a limit, to notice when its client leaves.

    Received bytes that wait here, and sent bytes that the client has not read, count against
    `max_inflight_bytes`.
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
        """Prepare the response to a handshake.

        Args:
            head: The head of the upgrade request.
            server_state: The connections and tasks of the server.
            max_size: The largest message in bytes.
            bytes_in_flight: The budget of `max_inflight_bytes`.
            timeouts: The timeouts of the connection.
            turns: The queue of turns that all connections share.
            on_lost: A function that is called once the connection is closed.

        Raises:
            BadRequest: `head` is not a valid handshake.
        """
        self._protocol = ServerProtocol(
            max_size=max_size, select_subprotocol=_choose_subprotocol, logger=package_logger
        )
        self._protocol.receive_data(head)
        events = self._protocol.events_received()
        self._response = self._protocol.accept(cast("Request", events[0])) if events else None
        if self._response is None or self._response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            error = self._protocol.handshake_exc
            raise BadRequest(
                f"This is no handshake of a WebSocket: {error and (error.__cause__ or error)}."
            )
        self._connections, self._tasks = server_state.connections, server_state.tasks
        self._budget = bytes_in_flight
        self._timeouts = timeouts
        self._turns = turns
        self._on_lost = on_lost
        self._counted_bytes = CountedBytes(bytes_in_flight)
        self._unparsed = bytearray()  # bytes that are not parsed yet
        self._missing_bytes = 0  # bytes of the current frame that are not parsed yet
        self._fragments = 0  # number of frames of the current message
        self._idle_frames = 0  # pings, pongs and empty fragments in this second
        self._partial_message = bytearray()  # content of the current message's complete frames
        self._partial_bytes = 0  # bytes of the current message, including an incomplete frame
        self._is_text = False
        self._complete_messages: deque[bytes | str] = deque()  # complete messages
        self._waiting_bytes = 0  # bytes of the complete messages
        self._wakeup = asyncio.Event()
        self._client_left = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._is_paused = self._is_stopping = self._is_held_open = self._is_turn_scheduled = False
        self._message_s = 0  # seconds since the current message began
        self._silent_s = 0  # seconds since the last bytes from the client
        self._unsent_bytes = 0  # bytes that the client had not read at the last tick
        self._stalled_s = 0  # seconds since the client last read bytes

    def start(
        self,
        transport: asyncio.Transport,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        scope: Scope,
    ) -> None:
        """Take over the transport and serve `app` in a task."""
        self.transport = transport
        transport.set_protocol(self)
        self._connections.add(cast("Any", self))
        task = asyncio.get_running_loop().create_task(
            self._run(app, {**scope, "type": "websocket", CLIENT_LEFT: self._client_left})
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], scope: Scope
    ) -> None:
        try:
            await app(scope, self.receive, self.send)
        except OSError:  # The client has left.
            pass
        except Exception:  # the boundary of a connection
            logger.exception("a WebSocket connection ends, because the server failed")
            self._fail(FAILED, "The server failed; its log says why.")
        if self._is_stopping:
            self._fail(RESTART, "The server stops.")
        if not self._is_held_open:
            self.transport.close()

    # Methods that the event loop and uvicorn's server call

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client, or store them for a later turn."""
        if self._is_held_open:
            return
        self._silent_s = 0
        self._unparsed += data
        try:
            self._counted_bytes.grow_to(self._held_bytes)
        except NoRoom as error:
            self._fail(TRY_AGAIN, error.message)
            return
        if not self._is_turn_scheduled:
            self._parse()
        if len(data) > LARGE_READ_BYTES:
            self._take_turn()  # Otherwise the event loop would continue to read in this turn.
        self._update_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake the application, and give the counted bytes back to the budget."""
        for event in (self._client_left, self._wakeup, self._writable):
            event.set()
        self._counted_bytes.give_back()
        self._budget.set_unread(self, 0)
        self._connections.discard(cast("Any", self))
        self._on_lost(exc)

    def pause_writing(self) -> None:
        """Let the application wait until the client reads."""
        self._writable.clear()
        self._count_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Let the application send again."""
        self._writable.set()
        self._count_unread(0)

    def shutdown(self) -> None:
        """Close after the current response, because the server stops."""
        self._is_stopping = True
        self._wakeup.set()

    def on_tick(self) -> None:
        """Check the timeouts; `connection_clock.py` calls this once a second."""
        timeouts, unsent_bytes = self._timeouts, self.transport.get_write_buffer_size()
        self._idle_frames = 0
        self._stalled_s = (
            self._stalled_s + 1 if unsent_bytes and unsent_bytes >= self._unsent_bytes else 0
        )
        self._unsent_bytes = unsent_bytes
        # Replies to pings are written even if the client reads nothing, so they are counted here.
        self._count_unread(unsent_bytes)
        if self._stalled_s > timeouts.write:
            self.transport.abort()
        if self._is_paused or unsent_bytes or self._protocol.state is not State.OPEN:
            # Reading is paused, or the client need not send bytes now.
            self._silent_s = 0
            return
        self._silent_s += 1
        if self._silent_s == PING_AFTER_S:
            self._protocol.send_ping(b"")
            self._write()
        elif self._silent_s > 2 * PING_AFTER_S:
            self._fail(FAILED, f"Nothing has come for {self._silent_s} s, and no answer to a ping.")
        if self._partial_bytes:
            self._message_s += 1
            if self._message_s > timeouts.body + self._partial_bytes / timeouts.body_rate:
                self._fail(
                    POLICY,
                    f"The message came too slowly: {self._partial_bytes} bytes in"
                    f" {self._message_s} s (body_timeout).",
                )

    def cut_off(self) -> None:
        """Abort the connection, because its unread responses exceed the budget."""
        self.transport.abort()

    # Methods that the application calls

    async def receive(self) -> Message:
        """Return the next message, at most one in each turn of the loop, or a disconnect."""
        while not (
            (self._wakeup.is_set() and self._complete_messages)
            or self._client_left.is_set()
            or self._is_stopping
        ):
            self._wakeup.clear()
            await self._wakeup.wait()
        if self._client_left.is_set() or self._is_stopping:
            return {"type": "websocket.disconnect"}
        message = self._complete_messages.popleft()
        self._waiting_bytes -= len(message) + MESSAGE_OVERHEAD_BYTES
        self._counted_bytes.shrink_to(self._held_bytes)
        if self._complete_messages or self._unparsed or self._is_paused:
            self._wakeup.clear()
            self._take_turn()
        return {
            "type": "websocket.receive",
            "text" if isinstance(message, str) else "bytes": message,
        }

    async def send(self, message: Message) -> None:
        """Send a message once the client has read enough.

        Raises:
            OSError: The client has left.
        """
        await self._writable.wait()
        if self._client_left.is_set():
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

    # The WebSocket protocol

    @property
    def _held_bytes(self) -> int:
        """Bytes that the application has not received yet."""
        return len(self._unparsed) + self._partial_bytes + self._waiting_bytes

    @property
    def _has_enough(self) -> bool:
        return bool(self._complete_messages) and self._held_bytes > MAX_AHEAD_BYTES

    def _parse(self) -> None:
        """Parse the frames of one turn, until enough messages wait."""
        ahead, protocol = self._unparsed, self._protocol
        for _ in range(FRAMES_PER_TURN):
            size = 0 if self._has_enough else self._next_size()
            if not size or protocol.state in (State.CLOSING, State.CLOSED):
                break
            protocol.receive_data(bytes(memoryview(ahead)[:size]))
            del ahead[:size]
            self._missing_bytes -= size
            frames = cast("list[Frame]", protocol.events_received())
            for frame in frames:
                self._add_frame(frame)
            self._partial_bytes = (
                len(self._partial_message) if frames else self._partial_bytes + size
            )
        else:
            self._take_turn()
        self._write()

    def _next_size(self) -> int:
        """Return the number of bytes to parse next, or 0 if the frame's length is unknown."""
        ahead = self._unparsed
        if not self._missing_bytes and len(ahead) > 1:
            size = ahead[1] & 0x7F
            header_size = 2 + LENGTH_BYTES.get(size, 0)
            if len(ahead) >= header_size:
                self._missing_bytes = (
                    header_size
                    + MASK_BYTES
                    + (int.from_bytes(ahead[2:header_size], "big") if header_size > 2 else size)
                )
        return min(self._missing_bytes, len(ahead))

    def _take_turn(self) -> None:
        """Continue in another turn of the event loop, so that other connections run before."""
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            self._turns.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_turn_scheduled = False
        if not self.transport.is_closing():
            self._parse()
            self._update_reading()
            if self._complete_messages:
                self._wakeup.set()

    def _update_reading(self) -> None:
        """Pause reading while a turn is scheduled or enough messages wait, else resume it."""
        should_pause = self._has_enough or self._is_turn_scheduled or self._is_held_open
        if should_pause is not self._is_paused and not self.transport.is_closing():
            self._is_paused = should_pause
            (self.transport.pause_reading if should_pause else self.transport.resume_reading)()

    def _add_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self._client_left.set()
        is_control = frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
        if is_control or not (frame.data or frame.fin):
            self._idle_frames += 1
            if self._idle_frames > MAX_IDLE_FRAMES:
                self._refuse(
                    f"At most {MAX_IDLE_FRAMES} pings, pongs and empty fragments a second are"
                    " taken."
                )
        if is_control:
            self._wakeup.set()
            return
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._partial_message += frame.data
        self._fragments += 1
        if self._fragments > MAX_FRAGMENTS + (len(self._partial_message) >> 10):
            self._refuse(
                f"A message has at most {MAX_FRAGMENTS} fragments, and one more for each KiB."
            )
        if frame.fin:
            self._fragments = 0
            try:
                self._complete_messages.append(
                    self._partial_message.decode()
                    if self._is_text
                    else bytes(self._partial_message)
                )
            except UnicodeDecodeError:
                self._fail(INVALID, "The text is not UTF-8.")
                return
            self._waiting_bytes += len(self._complete_messages[-1]) + MESSAGE_OVERHEAD_BYTES
            self._partial_message.clear()
            self._message_s = 0
            self._wakeup.set()

    def _write(self) -> None:
        for data in self._protocol.data_to_send():
            if data and not self.transport.is_closing():
                self.transport.write(data)
            elif not data and not self._is_held_open:  # Empty data means that the connection ends.
                self.transport.close()

    def _count_unread(self, size: int) -> None:
        self._budget.set_unread(self, size)
        if self._budget.overdrawn:
            # A write may be in progress here, so connections are closed later.
            asyncio.get_running_loop().call_soon(self._budget.shed)

    def _refuse(self, reason: str) -> None:
        """Tell the client the exceeded limit, stop reading, and close after `REFUSAL_HOLD_S`."""
        if not self._is_held_open:
            self._is_held_open = True
            self._fail(POLICY, reason)
            self._client_left.set()
            asyncio.get_running_loop().call_later(REFUSAL_HOLD_S, self.transport.close)

    def _fail(self, code: int, reason: str) -> None:
        self._protocol.fail(code, reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"))
        self._write()


def _choose_subprotocol(protocol: ServerProtocol, offered: Any) -> Subprotocol | None:
    return Subprotocol(SUBPROTOCOL) if SUBPROTOCOL in offered else None
