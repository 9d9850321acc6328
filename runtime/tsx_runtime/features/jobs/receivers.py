"""The receivers that get no callback for now, so that an unresponsive one does not delay others."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

MAX_CALLS = 2  # simultaneous calls of one receiver; one if its last call failed
MAX_FAILURES = 3  # consecutive failures before calls pause
MAX_PAUSE_S = 300.0
MAX_FAILING = 200  # remembered receivers whose last call failed


def receiver_of(url: str) -> str:
    """Return the beginning of a callback's URL: `https://HOST:PORT/`."""
    return "/".join((*url.split("/", 3)[:3], ""))


class Receivers:
    """The running calls, and the receivers whose last call failed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: Counter[str] = Counter()
        # The number of consecutive failures, and the time from which the next call may begin.
        self._failing: dict[str, tuple[int, float]] = {}

    def pauses(self) -> dict[str, float]:
        """Return the receivers to skip and the seconds left (inf: until one of its calls ends)."""
        now = self._clock()
        failing_receivers = {
            name: until - now for name, (_, until) in self._failing.items() if until > now
        }
        busy_receivers = [
            name
            for name, calls in self._calls.items()
            if calls >= (1 if name in self._failing else MAX_CALLS)
        ]
        return failing_receivers | dict.fromkeys(busy_receivers, math.inf)

    def begin(self, receiver: str) -> None:
        self._calls[receiver] += 1

    def end(self, receiver: str, *, failed: bool) -> None:
        self._calls -= Counter([receiver])
        failures = self._failing.pop(receiver, (0, 0.0))[0] + 1
        if failed:
            pause = min(2.0 ** min(failures, 20), MAX_PAUSE_S) if failures >= MAX_FAILURES else 0.0
            self._failing[receiver] = failures, self._clock() + pause
            if len(self._failing) > MAX_FAILING:
                del self._failing[next(iter(self._failing))]
