"""How many replicas a rate of requests takes, from a measured curve: `tsx plan` without its files and its words."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from tsx_cli.bench.configuration import Configuration
from tsx_cli.bench.predict import OVERHEAD_MS, Timing, capacity, slowdown
from tsx_cli.bench.results import Offered
from tsx_cli.bench.simulate import Simulated, constant, poisson, recorded, simulate
from tsx_cli.bench.slo import Slo
from tsx_runtime.core.queue import Limits

REQUESTS = 40_000  # that are simulated
CLOSED = 4_000  # of a closed loop, whose latencies vary less
MOST = 100_000  # replicas
IDLE = 0.001  # of what it can do: hardly a request finds another one there
FULL = 0.95  # of the workers' time: beyond it, without bounds, the least burst makes a queue that does not end
SCALES = (0.5, 3.0)  # what a server may take of the time that its curve says; beyond them something else was measured


class Replica(NamedTuple):
    """One server as the benchmark ran it. `scale` is how many times its batches take what the curve says."""

    timing: Timing
    configuration: Configuration
    cores: int
    limits: Limits
    queue_size: int = 100
    scale: float = 1.0

    @property
    def times(self) -> list[float]:
        return [self.scale * self.timing.batch_ms(size) for size in range(1, self.limits.max_items + 1)]

    @property
    def slow(self) -> list[float]:
        return [slowdown(self.timing, self.configuration, self.cores, active) for active in range(self.configuration.workers + 1)]

    @property
    def capacity(self) -> float:
        return capacity(self.timing, self.configuration, self.cores) / self.scale


class Planned(NamedTuple):
    """`at` is what each of the replicas does at the rate asked for, `headroom` what it would do with the headroom used up."""

    replicas: int
    at: Simulated
    with_headroom: Simulated


def scale_of(replica: Replica, offered: Offered, throughput: float, p50_ms: float) -> float:
    """How many times the curve's time a batch took on the server, by what was measured of it at one load.

    In a closed loop everything is as much slower as the throughput is less; of an open one the median latency tells.
    """
    if throughput <= 0 or p50_ms <= 0:
        return 1.0
    if offered.mode == "open":
        told = served(replica, poisson(offered.rate or throughput, CLOSED, seed=1))
        factor = p50_ms / told.p50_ms if told.p50_ms else 1.0
    else:
        told = simulate(
            replica.times,
            range(CLOSED),
            workers=replica.configuration.workers,
            connections=offered.connections,
            slow=replica.slow,
            spread=replica.timing.spread,
            overhead_ms=OVERHEAD_MS,
            limits=replica.limits,
        )
        factor = told.throughput / throughput
    return min(max(factor, SCALES[0]), SCALES[1])


def served(replica: Replica, arrivals: Sequence[float], seed: int = 0) -> Simulated:
    return simulate(
        replica.times,
        arrivals,
        workers=replica.configuration.workers,
        slow=replica.slow,
        spread=replica.timing.spread,
        overhead_ms=OVERHEAD_MS,
        limits=replica.limits,
        queue_size=replica.queue_size,
        seed=seed,
    )


def plan(
    replica: Replica,
    rate: float,
    slo: Slo | None,
    *,
    headroom: float = 0.0,
    moments: Sequence[float] = (),
    seed: int = 0,
    requests: int = REQUESTS,
) -> Planned | None:
    """The least number of replicas that keeps the bounds with this share more of requests; None where no number does.

    Each request goes to one of them by chance. `moments` are those of a recording, which come closer or further apart to make the rate.
    """

    def share(rate: float, replicas: int) -> Simulated:
        """What one of so many does."""
        if len(moments) > 1:
            return served(replica, _drawn(recorded(moments, rate), replicas, requests, seed), seed)
        return served(replica, poisson(rate / replicas, requests, seed), seed)

    if not _keeps(served(replica, constant(IDLE * replica.capacity, 1000), seed), slo):
        return None  # a request that comes to an idle server is too late already
    most = rate * (1 + headroom)
    accepted = 1 - (0.0 if slo is None else slo.errors)
    high = max(1, math.ceil(0.98 * accepted * most / replica.capacity))
    low = high - 1
    while not _keeps(share(most, high), slo):
        if high >= MOST or most / high < IDLE * replica.capacity:
            return None
        low, high = high, min(MOST, high + max(1, high // 4))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _keeps(share(most, middle), slo) else (middle, high)
    return Planned(high, share(rate, high), share(most, high))


def _drawn(moments: Sequence[float], replicas: int, requests: int, seed: int) -> list[float]:
    """Those that come to one replica, of a recording that begins again until there are enough."""
    chance = random.Random(seed)
    period = moments[-1] * len(moments) / (len(moments) - 1)
    wanted = min(requests * replicas, 20 * requests)  # of many replicas most is thrown away
    rounds = max(1, round(wanted / len(moments)))
    return [turn * period + moment for turn in range(rounds) for moment in moments if replicas == 1 or chance.random() * replicas < 1]


def _keeps(told: Simulated, slo: Slo | None) -> bool:
    if not told.answered:
        return True
    errors = told.refused / (told.refused + told.answered)
    if slo is None:
        return errors == 0 and told.utilisation <= FULL
    return not slo.broken(told._asdict(), errors)
