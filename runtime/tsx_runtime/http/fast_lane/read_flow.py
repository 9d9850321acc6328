"""Pauses and resumes the reading of one connection."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

from tsx_runtime.http.turns import Turns

# A client that has sent so many bytes ahead of the request that it waits for is not read from.
AHEAD = 64 << 10
LOW = AHEAD // 2  # bytes left at which it is read from again


class ReadFlow(FlowControl):
    """Reading pauses where uvicorn asks for it, for a body that its route has not taken yet, and
    where too much was sent ahead.

    It is resumed in one of the next turns of the event loop, of which each resumes a few
    connections.
    """

    def __init__(self, transport: asyncio.Transport, turns: Turns) -> None:
        super().__init__(transport)
        self.is_ahead = False
        self._read_from = transport
        self._turns = turns
        self._resumes = False  # soon

    def pause_reading(self) -> None:
        self._resumes = False
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self.is_ahead and not self._resumes:
            self._resumes = True
            self._turns.call_soon(self._resume)

    def _resume(self) -> None:
        if self._resumes and not self._read_from.is_closing():
            self._resumes = False
            super().resume_reading()

    def yield_turn(self) -> None:
        """Read on in another turn: the event loop would read megabytes from one connection in this
        one.
        """
        if not self._read_from.is_closing():
            self.pause_reading()
            self.resume_reading()

    def limit(self, ahead: int) -> None:
        """`ahead` bytes are waiting."""
        if ahead > AHEAD:
            self.is_ahead = True
            self.pause_reading()
        elif self.is_ahead and ahead <= LOW:
            self.release()

    def release(self) -> None:
        """Read again: what waits is an incomplete request."""
        self.is_ahead = False
        self.resume_reading()

    def detach(self) -> None:
        """Read now, and never resume later: from here on another protocol pauses the transport."""
        self.is_ahead = self._resumes = False
        super().resume_reading()
