"""Raises the rate of an open loop to the knee: the highest rate at which the bounds hold and the
throughput follows.
"""

from __future__ import annotations

from collections.abc import Callable

from tsx_cli.bench.model.points import confirmed_best, knee_of
from tsx_cli.bench.model.results import OfferedLoad, Point
from tsx_cli.bench.model.statistics import FEWEST
from tsx_cli.bench.search.confirm import Measurer
from tsx_cli.bench.search.ladder import bisected, three_digits

FIRST, STEP = 0.1, 1.5  # times the throughput of a closed loop, and times the rate before
LEAST = 0.01  # of that throughput: where even this rate does not hold, none is looked for
NEAR = 0.05  # of a rate: rates that are closer are not told apart
SHARE = 0.3  # of the time of a run, that is kept for its ramp
LOWERED = 5  # times at most that a rate is given up which no longer holds when it is measured again

Attempt = Callable[
    [float], Point | None
]  # one more round at a rate; None where there is no time left for it, or where it failed


def to_the_knee(attempt: Attempt, throughput: float, rounds: int = FEWEST) -> None:
    """Measures the course of the latency up to the knee, then narrows the knee, and measures the
    highest rate that holds so many times.

    `throughput` is what a closed loop reached. The points that `attempt` has made tell the result:
    `points.knee_of`.
    """
    held, rate = 0.0, FIRST * throughput
    while (point := attempt(three_digits(rate))) is not None and point.holds:
        held, rate = three_digits(rate), rate * STEP
    if point is None:
        return
    broken = three_digits(rate)
    while held == 0 and broken > LEAST * throughput:
        if (point := attempt(three_digits(broken / 2))) is None:
            return
        held, broken = (
            (three_digits(broken / 2), broken) if point.holds else (0.0, three_digits(broken / 2))
        )
    if held == 0:
        return
    held, _ = bisected(
        lambda rate: _holds(attempt, rate), held, broken, (held + broken) / 2, NEAR * broken
    )
    for _ in range(LOWERED):
        point = attempt(held)
        while point is not None and point.holds and len(point.counted) < rounds:
            point = attempt(held)
        if point is None or point.holds:
            return
        held = three_digits((1 - NEAR) * held)


def _holds(attempt: Attempt, rate: float) -> bool | None:
    point = attempt(rate)
    return None if point is None else point.holds


def ramp_of(run: Measurer, at: int) -> bool:
    """Of one configuration, as far as there is time left; whether the knee was found."""
    points = run.trial(at).points
    position = confirmed_best(points)
    if position is None:
        return False

    def at_rate(rate: float) -> Point | None:
        offered = OfferedLoad(mode="open", rate=rate, arrivals="poisson")
        if run.seconds_left() < run.round_seconds or not run.attempt(at, offered):
            return None
        return next(point for point in points if point.offered == offered)

    to_the_knee(at_rate, points[position].throughput.value, run.options.rounds)
    return knee_of(points).known(run.options.rounds)
