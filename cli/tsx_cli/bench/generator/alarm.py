"""A timer for event loops with microsecond precision: the loops' own timers count in milliseconds,
too coarse for arrivals.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys
import time
from collections.abc import Callable

_TIMES = struct.Struct(
    "@qqqq"
)  # struct itimerspec: interval and value, each of seconds and nanoseconds
_MONOTONIC, _NONBLOCK_CLOEXEC, _ABSOLUTE = 1, 0o2004000, 1
_PR_SET_TIMERSLACK = 29

clock = time.perf_counter  # CLOCK_MONOTONIC, where this matters


class PreciseTimer:
    """Calls `ring` at the last set time, in seconds of `clock`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = _open() if sys.platform == "linux" else -1
        if self._descriptor >= 0:
            loop.add_reader(self._descriptor, self._rings)

    def set(self, moment: float) -> None:
        if self._descriptor < 0:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(max(0.0, moment - clock()), self._ring)
            return
        seconds = int(moment)
        value = _TIMES.pack(0, 0, seconds, max(1, int((moment - seconds) * 1e9)))
        assert _libc is not None
        _libc.timerfd_settime(self._descriptor, _ABSOLUTE, value, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _rings(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:  # it was set again in between
            return
        self._ring()


def _open() -> int:
    """-1 where there is no such timer."""
    if _libc is None or not hasattr(_libc, "timerfd_create"):
        return -1
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # wake when it is time, not up to 50 us later
    return int(_libc.timerfd_create(_MONOTONIC, _NONBLOCK_CLOEXEC))


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
