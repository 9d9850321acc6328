"""Computes the replicas for a request rate from a measured curve: `tsx plan` without files and command line."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from tsx_archiver.metadata.slo import Bound, Slo
from tsx_cli.bench.model.replica import Replica, served
from tsx_cli.bench.model.simulate import SimulationResult, constant, poisson, recorded

REQUESTS = 40_000  # that are simulated
MOST = 100_000  # replicas
IDLE = 0.001  # of what it can do: hardly a request finds another one there
STEPS = 8  # halvings on the way to the highest rate
FULL = 0.95  # of the workers' time: beyond it, without bounds, the least burst makes a queue that does not end


class CapacityPlan(NamedTuple):
    """`at` is what each of the replicas does at the rate asked for, `quickest` and `slowest` the same with batches as long as in the
    quickest and in the slowest round that was measured, and `with_headroom` with the headroom used up."""

    replicas: int
    highest: float  # requests per second with which one of them keeps the bounds
    at: SimulationResult
    quickest: SimulationResult
    slowest: SimulationResult
    with_headroom: SimulationResult
    replicas_at_slowest: int | None  # with batches as long as in the slowest round; None where no number keeps the bounds


def plan(
    replica: Replica,
    rate: float,
    slo: Slo | None,
    *,
    headroom: float = 0.0,
    moments: Sequence[float] = (),
    seed: int = 0,
) -> CapacityPlan | None:
    """The least number of replicas that keeps the bounds with this share more of requests; None where no number does.

    Each request goes to one of them by chance. `moments` are those of a recording, which come closer or further apart to make the rate.
    """
    arrivals = _Arrivals(tuple(moments), seed)
    most = rate * (1 + headroom)
    found = least(replica, most, slo, arrivals)
    if found is None:
        return None

    def simulated(replica: Replica, rate: float = rate) -> SimulationResult:
        return served(replica, arrivals.of_one(rate, found), seed)

    at, (low, high) = simulated(replica), replica.quickest_and_slowest
    with_headroom = simulated(replica, most) if headroom else at
    return CapacityPlan(
        found,
        max(highest(replica, slo, seed), most / found),
        at,
        simulated(low),
        simulated(high),
        with_headroom,
        least(high, most, slo, arrivals, found),
    )


class _Arrivals(NamedTuple):
    moments: tuple[float, ...]  # of a recording; none: by chance
    seed: int

    def of_one(self, rate: float, replicas: int) -> list[float]:
        """When the requests of one of so many come."""
        if len(self.moments) > 1:
            return _drawn(recorded(self.moments, rate), replicas, self.seed)
        return poisson(rate / replicas, REQUESTS, self.seed)


def least(replica: Replica, most: float, slo: Slo | None, arrivals: _Arrivals, fewest: int = 1) -> int | None:
    """The least number of replicas that keeps the bounds at so many requests a second, from `fewest` on; None where no number does."""

    def share(replicas: int) -> SimulationResult:
        return served(replica, arrivals.of_one(most, replicas), arrivals.seed)

    slo = slo_of(replica, slo)
    if not _keeps(served(replica, constant(IDLE * replica.capacity, 1000), arrivals.seed), slo):
        return None  # a request that comes to an idle server is too late already
    accepted = 1 - (0.0 if slo is None else slo.errors)
    high = max(fewest, math.ceil(0.98 * accepted * most / replica.capacity))
    low = high - 1
    while not _keeps(share(high), slo):
        if high >= MOST or most / high < IDLE * replica.capacity:
            return None
        low, high = high, min(MOST, high + max(1, high // 4))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _keeps(share(middle), slo) else (middle, high)
    return high


def highest(replica: Replica, slo: Slo | None, seed: int = 0) -> float:
    """The most requests a second with which one replica keeps the bounds, if they come by chance; 0 where no rate does."""
    low, high, slo = 0.0, replica.capacity, slo_of(replica, slo)
    for _ in range(STEPS):
        rate = (low + high) / 2
        low, high = (rate, high) if _keeps(served(replica, poisson(rate, REQUESTS, seed), seed), slo) else (low, rate)
    return low


def slo_of(replica: Replica, slo: Slo | None) -> Slo | None:
    """A model with a latency target refuses what it cannot answer in time: as many requests as may be late."""
    if replica.target is None or slo is None or slo.errors:
        return slo
    return Slo((*slo.bounds, Bound("errors", 1 - replica.target.quantile, "")))


def _drawn(moments: Sequence[float], replicas: int, seed: int) -> list[float]:
    """Those that come to one replica, of a recording that begins again until there are enough."""
    chance = random.Random(seed)
    period = moments[-1] * len(moments) / (len(moments) - 1)
    wanted = min(replicas, 20) * REQUESTS  # of many replicas most is thrown away
    rounds = max(1, round(wanted / len(moments)))
    return [turn * period + moment for turn in range(rounds) for moment in moments if replicas == 1 or chance.random() * replicas < 1]


def _keeps(result: SimulationResult, slo: Slo | None) -> bool:
    if not result.answered:
        return True
    errors = result.refused / (result.refused + result.answered)
    if slo is None:
        return errors == 0 and result.utilisation <= FULL
    return not slo.broken(result._asdict(), errors)
