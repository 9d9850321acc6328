"""The flow control that pauses and resumes the reading of one connection."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

from tsx_runtime.http.turns import Turns

# Reading pauses when a client has sent more bytes behind the request under way.
MAX_AHEAD_BYTES = 64 << 10
RESUME_BYTES = MAX_AHEAD_BYTES // 2  # Reading resumes when as many bytes are left.


class ReadFlow(FlowControl):
    """A flow control that also pauses reading when a client has sent too many bytes ahead.

    uvicorn pauses for a body that its route has not read. Reading resumes in one of the next turns
    of the event loop, and each turn resumes a few connections.
    """

    def __init__(self, transport: asyncio.Transport, turns: Turns) -> None:
        super().__init__(transport)
        self.is_ahead = False
        self._read_transport = transport
        self._turns = turns
        self._will_resume = False  # whether reading resumes in one of the next turns

    def pause_reading(self) -> None:
        self._will_resume = False
        super().pause_reading()

    def resume_reading(self) -> None:
        """Resume reading in one of the next turns, unless too many bytes wait."""
        if self.read_paused and not self.is_ahead and not self._will_resume:
            self._will_resume = True
            self._turns.call_soon(self._resume)

    def _resume(self) -> None:
        if self._will_resume and not self._read_transport.is_closing():
            self._will_resume = False
            super().resume_reading()

    def yield_turn(self) -> None:
        """Pause reading until another turn, so that one connection cannot fill this turn."""
        if not self._read_transport.is_closing():
            self.pause_reading()
            self.resume_reading()

    def limit(self, ahead: int) -> None:
        """Pause or resume reading, as `ahead` bytes are waiting."""
        if ahead > MAX_AHEAD_BYTES:
            self.is_ahead = True
            self.pause_reading()
        elif self.is_ahead and ahead <= RESUME_BYTES:
            self.release()

    def release(self) -> None:
        """Resume reading, because an incomplete request waits."""
        self.is_ahead = False
        self.resume_reading()

    def detach(self) -> None:
        """Resume reading now for the last time, because another protocol takes the transport."""
        self.is_ahead = self._will_resume = False
        super().resume_reading()
