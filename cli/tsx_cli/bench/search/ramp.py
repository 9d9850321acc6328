"""Raises the rate of an open loop to the knee: the highest rate at which the bounds hold and the throughput follows."""

from __future__ import annotations

from collections.abc import Callable

from tsx_cli.bench.model.results import Point
from tsx_cli.bench.model.statistics import FEWEST

FIRST, STEP = 0.1, 1.5  # times the throughput of a closed loop, and times the rate before
LEAST = 0.01  # of that throughput: where even this rate does not hold, none is looked for
NEAR = 0.05  # of a rate: rates that are closer are not told apart
LOWERED = 5  # times at most that a rate is given up which no longer holds when it is measured again

Attempt = Callable[[float], Point | None]  # one more round at a rate; None where there is no time left for it, or where it failed


def to_the_knee(attempt: Attempt, throughput: float, rounds: int = FEWEST) -> None:
    """Measures the course of the latency up to the knee, then narrows the knee, and measures the highest rate that holds so many times.

    `throughput` is what a closed loop reached. The points that `attempt` has made tell the result: `points.knee_of`.
    """
    held, rate = 0.0, FIRST * throughput
    while (point := attempt(_rounded(rate))) is not None and point.holds:
        held, rate = _rounded(rate), rate * STEP
    if point is None:
        return
    broken = _rounded(rate)
    while held == 0 and broken > LEAST * throughput:
        if (point := attempt(_rounded(broken / 2))) is None:
            return
        held, broken = (_rounded(broken / 2), broken) if point.holds else (0.0, _rounded(broken / 2))
    held, _ = bisected(lambda rate: _holds(attempt, rate), held, broken, (held + broken) / 2, NEAR * broken)
    for _ in range(LOWERED):
        point = attempt(held) if held else None
        while point is not None and point.holds and len(point.counted) < rounds:
            point = attempt(held)
        if point is None or point.holds:
            return
        held = _rounded((1 - NEAR) * held)


def bisected(holds: Callable[[float], bool | None], low: float, high: float, first: float, near: float) -> tuple[float, float]:
    """The highest value that holds, and the lowest that does not, as near to each other as that; earlier where `holds` is None."""
    value = first
    while high - low > near:
        held = holds(_rounded(value))
        if held is None:
            break
        low, high = (_rounded(value), high) if held else (low, _rounded(value))
        value = (low + high) / 2
    return low, high


def _holds(attempt: Attempt, rate: float) -> bool | None:
    point = attempt(rate)
    return None if point is None else point.holds


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")
