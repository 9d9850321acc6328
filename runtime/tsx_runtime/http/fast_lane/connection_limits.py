"""The limits of one connection of the fast lane: size and time of heads, bodies, and unread
answers.

A connection is in one of six phases:

    BETWEEN   nothing under way; the next bytes begin a request
    HEAD      part of a head is there
    BODY      the head of a plain request is there, part of its body is missing
    ANSWER    a plain request is with the model, or its answer not taken yet; what the client sends meanwhile waits, so that
              answers keep their order and do not pile up
    UVICORN   uvicorn's own protocol has the connection until it has read and answered the one request that it was given; what
              follows waits as well
    REFUSED   the answer is out before the whole body came; what still comes of it is thrown away
"""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, Any, cast

from tsx_runtime.api.errors import form_of_meta
from tsx_runtime.api.headers import new_request_id
from tsx_runtime.api.messages import MAX_HEADERS
from tsx_runtime.core.scheduling.byte_budget import UNCOUNTED
from tsx_runtime.errors import HeadTooLarge, NoRoom, SlowRequest, TsxError
from tsx_runtime.http.fast_lane.heads import Head
from tsx_runtime.http.fast_lane.lane import LaneApp, lane_of
from tsx_runtime.http.fast_lane.pipelining import FRAMING_PER_BYTE, PipeliningProtocol
from tsx_runtime.http.turns import LARGE
from tsx_runtime.wire import Buffer

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState


class Phase(enum.IntEnum):
    BETWEEN = 0
    HEAD = 1
    BODY = 2
    ANSWER = 3
    UVICORN = 4
    REFUSED = 5


BETWEEN, HEAD, BODY, ANSWER, UVICORN, REFUSED = Phase
TOO_MUCH_FRAMING = (
    f"Sizes, extensions and trailers of the request's chunks have more than {FRAMING_PER_BYTE}"
    " bytes for each byte of content and those of max_header_size, which is"
)


class LimitedConnection(PipeliningProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._app = cast("LaneApp", config.app)  # `config.loaded_app` may be wrapped
        self.lane = lane_of(self._app, server_state)
        self.turns = self.lane.turns
        self._phase = BETWEEN
        self._ticks = 0  # seconds in this phase
        self._head: Head | None = None  # in the phase BODY
        self._pieces: list[Buffer] = []  # of its body
        self._counted = 0  # bytes of it that are taken from the budget
        self._idle = 0  # ticks since the last at which more of a body had come
        self._seen = -1  # bytes of it at that one
        self._missing = 0  # in the phase REFUSED: bytes that its body still has
        self._refused = False  # the message was answered, and its body still comes
        self._closing = False  # the server stops: no further request
        self._unsent = 0  # bytes of answers at the last tick that the client had not taken

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._closing = self._app.leaving
        self.lane.clock.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_body()
        self.lane.bytes_in_flight.set_unread(self, 0)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._count_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self.lane.bytes_in_flight.set_unread(self, 0)
        self._unsent = 0

    def finish(self, last: Buffer, keep_alive: bool) -> None:
        """Write the last bytes of an answer, and turn to the next request."""
        raise NotImplementedError

    def on_message_begin(self) -> None:
        self._ticks, self._seen, self._idle = 0, -1, 0
        self._refused = False
        super().on_message_begin()

    def on_tick(self) -> None:
        """A second has passed (see `connection_clock.py`)."""
        self._ticks += 1
        phase, timeouts = self._phase, self.lane.timeouts
        if self.flow.write_paused or self.transport.is_closing():
            self._check_writing()
        elif phase is BETWEEN:
            if self._ticks > timeouts.keep_alive:
                self.transport.close()
        elif phase is HEAD or (phase is UVICORN and self._in_head):
            if self._ticks > timeouts.head:
                self._give_up(
                    SlowRequest(
                        f"The request's headers did not arrive within {timeouts.head} s"
                        " (header_timeout)."
                    )
                )
        elif phase is REFUSED or (
            phase is UVICORN and self._reading and self.cycle.response_started
        ):
            self._check_refused()
        elif phase is BODY or (phase is UVICORN and self._reading and not self.flow.read_paused):
            self._check_body()

    def _check_body(self) -> None:
        timeouts, filled = self.lane.timeouts, self._filled
        self._idle = self._idle + 1 if filled == self._seen else 0
        self._seen = filled
        if self._ticks > timeouts.body + filled / timeouts.body_rate:
            self._give_up(
                SlowRequest(
                    f"The request's body came too slowly: {filled} bytes in {self._ticks} s"
                    " (body_timeout)."
                )
            )
        elif self._idle >= timeouts.body_idle:
            text = (
                f"Nothing of the request's body came for {timeouts.body_idle} s"
                f" (body_idle_timeout), after {filled} bytes of it."
            )
            self._give_up(SlowRequest(text))

    def _check_refused(self) -> None:
        """What still comes of a body that was answered is thrown away, for a time that does not
        grow with it.
        """
        if not self._refused:
            self._refused, self._ticks = True, 0
        elif self._ticks > self.lane.timeouts.body:
            self.transport.close()

    def _check_writing(self) -> None:
        size = self.transport.get_write_buffer_size()
        if size < self._unsent or self._unsent == 0:
            self._ticks = 0
        elif self._ticks > self.lane.timeouts.write:
            self.transport.abort()
        self._unsent = size
        self._count_unread(size)

    def _count_unread(self, size: int) -> None:
        budget = self.lane.bytes_in_flight
        budget.set_unread(self, size)
        if budget.overdrawn:
            self.loop.call_soon(budget.shed)  # not here, within a write

    def cut_off(self) -> None:
        """The client has too much to read, and the budget is used up."""
        self.transport.abort()

    def _fits(self, head: Head, came: int) -> bool:
        """Take from the budget the `came` bytes of a body that are there.

        Refuse it where they, or at first all of it, do not fit.
        """
        if head.length <= UNCOUNTED:
            return True
        budget = self.lane.bytes_in_flight
        try:
            if not self._counted:
                budget.check(head.length)
            budget.take(came)
        except NoRoom as error:
            self._refuse_body(error, head)
            return False
        self._counted += came
        return True

    def _check_head_size(self, size: int) -> bool:
        if size > self.lane.max_head:
            self._give_up(
                HeadTooLarge(
                    "The request's headers are larger than max_header_size, which is"
                    f" {self.lane.max_head} bytes."
                )
            )
            return False
        return True

    def _check_header_count(self, count: int) -> bool:
        if count > MAX_HEADERS:
            self._give_up(
                HeadTooLarge(f"The request has {count} headers; the limit is {MAX_HEADERS}.")
            )
        return count <= MAX_HEADERS

    def _check_framing(self, size: int) -> None:
        if size > self.lane.max_head:
            self._give_up(
                HeadTooLarge(f"{TOO_MUCH_FRAMING} {self.lane.max_head} bytes. Send larger chunks.")
            )

    def _give_up(self, error: TsxError) -> None:
        """Answer a request that is not complete, and close."""
        if self.transport.is_closing():
            return
        within = (
            self._phase is UVICORN and self._reading and not self._in_head
        )  # else uvicorn's cycle is that of the request before
        if self.cycle is None or (
            not self.cycle.response_started if within else self.cycle.response_complete
        ):
            status, answer = self.lane.response_heads.refusal(
                new_request_id(), error, keep_alive=False
            )
            self.lane.counts.add(status)
            self.transport.write(answer)
        self._drop_body()
        self.transport.close()

    def _refuse_body(self, error: NoRoom, head: Head) -> None:
        """Answer at once.

        A sender whose connection is closed would lose the answer, so the rest of the body is read
        and thrown away.
        """
        lane, missing = self.lane, head.length - self._filled
        error.more = missing > 0
        keep_alive = head.keep_alive and not self._closing
        status, answer = lane.response_heads.refusal(
            new_request_id(), error, error.more or keep_alive, form_of_meta(head.meta)
        )
        lane.counts.add(status)
        self._drop_body()
        if not missing:
            self._phase = ANSWER
            self.finish(answer, keep_alive)
            return
        self.transport.write(answer)
        self._missing = 0 if head.waits_for_go and not self._filled else missing
        self._set_phase(REFUSED)
        self._refused = True
        self._throw_away(0)

    def _throw_away(self, size: int) -> None:
        self._missing -= size
        if self._missing <= 0:
            self.transport.close()
        elif size > LARGE:
            self.flow.yield_turn()

    def _drop_body(self) -> None:
        self._head, self._pieces = None, []
        self.lane.bytes_in_flight.give(self._counted)
        self._counted = 0

    def _set_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._ticks = 0
