"""Periodic health checks of a worker, as decisions without I/O.

They find whether a worker is stuck or due for replacement.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

MEGA = 1 << 20
# Consecutive checks. When a whole server goes on after a Ctrl-Z, the front end may be its first
# process.
MIN_STOPPED_CHECKS = 2
# The part of a limit by which a worker may be early, so that a model's workers are not replaced
# together.
JITTER = 0.1


class Verdict(enum.Enum):
    FINE = "fine"
    ASK = "ask"  # request a sign of life
    SILENT = "silent"
    STOPPED = "stopped"


class Heartbeat:
    """Finds a worker that does not answer any more, although it has not ended.

    It counts its own checks instead of seconds, so that delays of the front end do not count. A
    worker that runs a batch has its response timeout instead, unless its process is stopped.
    """

    def __init__(self, interval: float, bound: float) -> None:
        self._interval = interval
        self._bound = bound  # 0: never ask
        self._stopped = 0
        self._silent = 0.0
        self._answered = 0

    def check(self, *, stopped: bool, busy: bool, answered: int, pings: int) -> Verdict:
        """Judge a worker.

        Args:
            stopped: Whether its process is stopped (SIGSTOP).
            busy: Whether it runs a batch.
            answered: Its number of answered requests so far.
            pings: The requested signs of life that are missing.
        """
        self._stopped = self._stopped + 1 if stopped else 0
        if stopped:
            return Verdict.STOPPED if self._stopped >= MIN_STOPPED_CHECKS else Verdict.FINE
        # This includes a worker that got a batch meanwhile: the sign is due before it.
        if pings:
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
        """Return the limit that is reached, or None.

        Args:
            early: This worker's part of the jitter, from 0 to 1.
            requests: Its answered requests.
            memory: Its resident bytes.
            age: Its age in seconds.
        """
        share = 1 - JITTER * early
        if self.requests and requests >= self.requests * share:
            return "requests"
        if self.memory and memory >= self.memory * MEGA * share:
            return "memory"
        if self.age and age >= self.age * share:
            return "age"
        return None
