"""Periodic health checks of a worker: whether it is stuck or due for replacement.

Decisions without I/O.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

MEGA = 1 << 20
# in a row: when a whole server goes on after a Ctrl-Z, the front end may be the first of its
# processes
STOPPED_LOOKS = 2
# the part of a limit by which a worker may come before it, so that those of one model do not come
# together
JITTER = 0.1


class Verdict(enum.Enum):
    FINE = "fine"
    ASK = "ask"  # for a sign of life
    SILENT = "silent"
    STOPPED = "stopped"


class Heartbeat:
    """Finds a worker that will not answer any more, although it has not ended.

    It counts its own looks, not the clock's seconds: time in which the front end itself was held up
    is not the worker's. A worker that is at work is left to its response timeout, unless its
    process is stopped.
    """

    def __init__(self, interval: float, bound: float) -> None:
        self._interval = interval
        self._bound = bound  # 0: never ask
        self._stopped = 0
        self._silent = 0.0
        self._answered = 0

    def look(self, *, stopped: bool, busy: bool, answered: int, pings: int) -> Verdict:
        """`answered`: requests so far; `pings`: signs of life that were asked for and have not
        come.
        """
        self._stopped = self._stopped + 1 if stopped else 0
        if stopped:
            return Verdict.STOPPED if self._stopped >= STOPPED_LOOKS else Verdict.FINE
        if pings:  # also of one that got a batch meanwhile: the sign was to come first
            self._silent += self._interval
            return Verdict.SILENT if self._silent >= self._bound else Verdict.FINE
        self._silent = 0.0
        lively = answered != self._answered
        self._answered = answered
        return Verdict.FINE if busy or lively or not self._bound else Verdict.ASK


class Recycling(NamedTuple):
    """The limits at which a worker is replaced; 0: never."""

    requests: int = 0
    memory: int = 0  # megabytes, resident
    age: int = 0  # seconds

    def reason(self, early: float, *, requests: int, memory: int, age: float) -> str | None:
        """Which limit is reached.

        `early`, from 0 to 1, is how much of the jitter this worker got; `memory` is in bytes.
        """
        share = 1 - JITTER * early
        if self.requests and requests >= self.requests * share:
            return "requests"
        if self.memory and memory >= self.memory * MEGA * share:
            return "memory"
        if self.age and age >= self.age * share:
            return "age"
        return None
