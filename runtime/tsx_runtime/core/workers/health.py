"""Periodic health checks of a worker, as decisions without I/O.

They tell whether a worker is stuck or due for replacement.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

MEGA = 1 << 20
# Consecutive checks. One is not enough: when a whole server continues after a Ctrl-Z, the front end
# may continue before its workers.
MIN_STOPPED_CHECKS = 2
# The fraction of a limit by which a worker may be replaced early, so that the workers of a model
# are not replaced together.
JITTER = 0.1


class Verdict(enum.Enum):
    FINE = "fine"
    ASK = "ask"  # send a ping
    SILENT = "silent"
    STOPPED = "stopped"


class Heartbeat:
    """Finds a worker that no longer answers, although it has not ended.

    It counts its own checks instead of seconds, so that delays of the front end do not count. While
    a worker runs a batch, only its response timeout applies, unless its process is stopped.
    """

    def __init__(self, interval: float, timeout: float) -> None:
        self._interval = interval
        self._timeout = timeout  # 0: no pings
        self._stopped_checks = 0
        self._silent_seconds = 0.0
        self._last_answered = 0

    def check(self, *, stopped: bool, busy: bool, answered: int, pings: int) -> Verdict:
        """Judge a worker.

        Args:
            stopped: Whether its process is stopped (SIGSTOP).
            busy: Whether it runs a batch.
            answered: The number of requests that it has answered so far.
            pings: The number of pings that it has not answered.
        """
        self._stopped_checks = self._stopped_checks + 1 if stopped else 0
        if stopped:
            return Verdict.STOPPED if self._stopped_checks >= MIN_STOPPED_CHECKS else Verdict.FINE
        # This includes a worker that got a batch after the ping, since it answers the ping first.
        if pings:
            self._silent_seconds += self._interval
            return Verdict.SILENT if self._silent_seconds >= self._timeout else Verdict.FINE
        self._silent_seconds = 0.0
        has_answered = answered != self._last_answered
        self._last_answered = answered
        return Verdict.FINE if busy or has_answered or not self._timeout else Verdict.ASK


class Recycling(NamedTuple):
    """The limits at which a worker is replaced; 0 means never."""

    requests: int = 0
    memory: int = 0  # megabytes, resident
    age: int = 0  # seconds

    def reason(self, jitter: float, *, requests: int, memory: int, age: float) -> str | None:
        """Return the limit that is reached, or None.

        Args:
            jitter: This worker's fraction of JITTER, from 0 to 1.
            requests: The number of requests that it has answered.
            memory: Its resident bytes.
            age: Its age in seconds.
        """
        limit_factor = 1 - JITTER * jitter
        if self.requests and requests >= self.requests * limit_factor:
            return "requests"
        if self.memory and memory >= self.memory * MEGA * limit_factor:
            return "memory"
        if self.age and age >= self.age * limit_factor:
            return "age"
        return None
