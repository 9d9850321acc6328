"""The due times of an open loop's requests: constant, random, or as recorded."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from tsx_cli.bench.generator.plan import LoadPlan


def due_times(plan: LoadPlan, seconds: float) -> array[float]:
    """In seconds from the start, for so many seconds; the n-th is that of payload n modulo their number."""
    if plan.arrivals == "recorded":
        return recorded([each.at or 0.0 for each in plan.payloads], plan.speed, seconds)
    assert plan.rate is not None
    return constant(plan.rate, seconds) if plan.arrivals == "constant" else poisson(plan.rate, seconds, plan.seed)


def constant(rate: float, seconds: float) -> array[float]:
    return array("d", (number / rate for number in range(max(1, int(rate * seconds)))))


def poisson(rate: float, seconds: float, seed: int) -> array[float]:
    chance = random.Random(seed)
    due, now = array("d"), chance.expovariate(rate)
    while now < seconds:
        due.append(now)
        now += chance.expovariate(rate)
    return due


def recorded(times: Sequence[float], speed: float, seconds: float) -> array[float]:
    """A recording that is shorter begins again, after its mean pause; one that has no length is sent once."""
    first, span = times[0], times[-1] - times[0]
    again = (span + span / max(1, len(times) - 1)) / speed
    due, start = array("d"), 0.0
    while start < seconds:
        due.extend(moment for at in times if (moment := start + (at - first) / speed) < seconds)
        if again <= 0:
            break
        start += again
    return due
