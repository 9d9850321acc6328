"""The attainment of a latency target: counts since the start, and of the last minutes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tsx_archiver.metadata.slo import LatencyTarget

RECENT_MINUTES = 5
BUDGET_MINUTES = 60  # period of the error budget


class SloReport(NamedTuple):
    """The attainment of a target, and the current decisions for it."""

    target: LatencyTarget
    batch_size: int  # size of the planned batches
    attained: int  # accepted requests that were answered within the target
    missed: int
    refused: int  # requests refused on arrival
    attainment: float | None  # fraction in the last RECENT_MINUTES, or None without a request
    # The remaining fraction of the misses that the target allows in BUDGET_MINUTES; negative if
    # more requests were missed.
    budget_left: float


class Attainment:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.attained = 0
        self.missed = 0
        self.refused = 0
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

    def report(self, target: LatencyTarget, batch_size: int) -> SloReport:
        attained, missed = self.counts_of_last(RECENT_MINUTES)
        recent_attainment = attained / (attained + missed) if attained + missed else None
        attained, missed = self.counts_of_last(BUDGET_MINUTES)
        allowed = (1 - target.quantile) * (attained + missed)
        budget_left = 1 - missed / allowed if allowed else 1.0
        return SloReport(
            target,
            batch_size,
            self.attained,
            self.missed,
            self.refused,
            recent_attainment,
            budget_left,
        )
