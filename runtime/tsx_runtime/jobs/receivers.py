"""Decides which receivers of callbacks get a call now: a silent one holds up no other."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

AT_ONCE = 2  # calls of one receiver; one where the last call failed
FAILURES = 3  # in a row, after which a receiver gets no call for a while
LONGEST_PAUSE_S = 300.0
REMEMBERED = 200  # receivers whose last call failed


def receiver_of(url: str) -> str:
    """Return the beginning of a callback's URL: `https://HOST:PORT/`."""
    return "/".join((*url.split("/", 3)[:3], ""))


class Receivers:
    """The calls that are under way, and the receivers whose last call failed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: Counter[str] = Counter()
        self._failing: dict[
            str, tuple[int, float]
        ] = {}  # failures in a row, and when the next call may begin

    def closed(self) -> dict[str, float]:
        """Return the receivers that get no call, and for how many seconds (inf: until one ends)."""
        now = self._clock()
        paused = {name: until - now for name, (_, until) in self._failing.items() if until > now}
        busy = [
            name
            for name, calls in self._calls.items()
            if calls >= (1 if name in self._failing else AT_ONCE)
        ]
        return paused | dict.fromkeys(busy, math.inf)

    def begin(self, receiver: str) -> None:
        self._calls[receiver] += 1

    def end(self, receiver: str, *, failed: bool) -> None:
        self._calls -= Counter([receiver])
        failures = self._failing.pop(receiver, (0, 0.0))[0] + 1
        if failed:
            pause = min(2.0 ** min(failures, 20), LONGEST_PAUSE_S) if failures >= FAILURES else 0.0
            self._failing[receiver] = failures, self._clock() + pause
            if len(self._failing) > REMEMBERED:
                del self._failing[next(iter(self._failing))]
