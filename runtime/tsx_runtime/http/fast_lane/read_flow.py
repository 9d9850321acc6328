"""The flow control that pauses and resumes reading from one connection."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

from tsx_runtime.http.turns import Turns

# Reading pauses when a client has sent more bytes after the current request.
MAX_AHEAD_BYTES = 64 << 10
RESUME_BYTES = MAX_AHEAD_BYTES // 2  # Reading resumes when so few bytes are left.


class ReadFlow(FlowControl):
    """A flow control that also pauses reading when a client has sent too many bytes ahead.

    uvicorn itself pauses while a body has not been read by its route. Reading resumes in one of the
    next turns of the event loop, because a turn resumes only a few connections.
    """

    def __init__(self, transport: asyncio.Transport, turns: Turns) -> None:
        super().__init__(transport)
        self.is_over_limit = False
        self._read_transport = transport
        self._turns = turns
        self._will_resume = False  # whether reading resumes in one of the next turns

    def pause_reading(self) -> None:
        self._will_resume = False
        super().pause_reading()

    def resume_reading(self) -> None:
        """Resume reading in one of the next turns, unless too many bytes wait."""
        if self.read_paused and not self.is_over_limit and not self._will_resume:
            self._will_resume = True
            self._turns.call_soon(self._resume)

    def _resume(self) -> None:
        if self._will_resume and not self._read_transport.is_closing():
            self._will_resume = False
            super().resume_reading()

    def yield_turn(self) -> None:
        """Pause reading until another turn, so that other connections can run before."""
        if not self._read_transport.is_closing():
            self.pause_reading()
            self.resume_reading()

    def limit(self, ahead_bytes: int) -> None:
        """Pause or resume reading, depending on the number of stored bytes."""
        if ahead_bytes > MAX_AHEAD_BYTES:
            self.is_over_limit = True
            self.pause_reading()
        elif self.is_over_limit and ahead_bytes <= RESUME_BYTES:
            self.release()

    def release(self) -> None:
        """Resume reading, because the stored request is incomplete."""
        self.is_over_limit = False
        self.resume_reading()

    def detach(self) -> None:
        """Resume reading at once, because another protocol takes over the transport."""
        self.is_over_limit = self._will_resume = False
        super().resume_reading()
