"""The attainment of a latency target: counts since the start, and of the last minutes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

RECENT_MINUTES = 5
BUDGET_MINUTES = 60  # period of the error budget


class Attainment:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.attained = 0  # accepted requests that were answered within the target
        self.missed = 0
        self.refused = 0  # requests refused on arrival
        self._clock = clock
        # Each minute with requests: its number, and both counts at its beginning.
        self._minutes: deque[tuple[int, int, int]] = deque(maxlen=BUDGET_MINUTES + 1)

    def add(self, attained: int, missed: int) -> None:
        minute = int(self._clock() // 60)
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, self.attained, self.missed))
        self.attained += attained
        self.missed += missed

    def counts_of_last(self, minutes: int) -> tuple[int, int]:
        """Return attained and missed requests of the last minutes, including the current one."""
        first_minute = int(self._clock() // 60) - minutes + 1
        _, attained, missed = next(
            (entry for entry in self._minutes if entry[0] >= first_minute),
            (0, self.attained, self.missed),
        )
        return self.attained - attained, self.missed - missed

    def recent(self) -> float | None:
        """Return the attained fraction of the last RECENT_MINUTES, or None without a request."""
        attained, missed = self.counts_of_last(RECENT_MINUTES)
        return attained / (attained + missed) if attained + missed else None

    def budget_left(self, quantile: float) -> float:
        """Return the remaining fraction of the misses that a target allows in BUDGET_MINUTES.

        It is negative if more requests were missed.
        """
        attained, missed = self.counts_of_last(BUDGET_MINUTES)
        allowed = (1 - quantile) * (attained + missed)
        return 1 - missed / allowed if allowed else 1.0
