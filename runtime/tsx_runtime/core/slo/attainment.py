"""How well a latency target is kept: counts since the start, and those of the last minutes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.slo.curve import LatencyCurve

RECENT = 5  # minutes
BUDGET = 60  # minutes over which the error budget is counted


class SloReport(NamedTuple):
    target: LatencyTarget
    batch_size: int  # that is aimed at
    waiting: int  # requests that may wait
    attained: int  # accepted requests that were answered within the target
    missed: int
    refused: int  # on arrival
    attainment: float | None  # share of the requests of the last RECENT minutes; None without one
    # of the misses that the target allows among the requests of BUDGET minutes, the share that is
    # left; below 0: overspent
    budget_left: float
    curve: LatencyCurve | None = None  # as it was learned so far
    seconds: float = 0.0  # of the target, that requests are accepted by


class Attainment:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.attained = 0
        self.missed = 0
        self.refused = 0
        self._clock = clock
        self._minutes: deque[tuple[int, int, int]] = deque(
            maxlen=BUDGET + 1
        )  # with requests: the number, both counts when it began

    def add(self, attained: int, missed: int) -> None:
        minute = int(self._clock() // 60)
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, self.attained, self.missed))
        self.attained += attained
        self.missed += missed

    def over(self, minutes: int) -> tuple[int, int]:
        """Attained and missed requests of the last minutes, the current one included."""
        first = int(self._clock() // 60) - minutes + 1
        _, attained, missed = next(
            (entry for entry in self._minutes if entry[0] >= first), (0, self.attained, self.missed)
        )
        return self.attained - attained, self.missed - missed

    def report(self, target: LatencyTarget, batch_size: int, waiting: int) -> SloReport:
        attained, missed = self.over(RECENT)
        share = attained / (attained + missed) if attained + missed else None
        attained, missed = self.over(BUDGET)
        allowed = (1 - target.quantile) * (attained + missed)
        left = 1 - missed / allowed if allowed else 1.0
        return SloReport(
            target, batch_size, waiting, self.attained, self.missed, self.refused, share, left
        )
