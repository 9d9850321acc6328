"""How many replicas a rate of requests takes, from a measured curve: `tsx plan` without its files and its words."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from tsx_cli.bench.configuration import Configuration
from tsx_cli.bench.predict import OVERHEAD_MS, TAIL, Timing, capacity, slowdown
from tsx_cli.bench.results import Offered
from tsx_cli.bench.simulate import Simulated, constant, poisson, recorded, simulate
from tsx_cli.bench.slo import Slo
from tsx_runtime.core.queue import Limits

REQUESTS = 40_000  # that are simulated
CLOSED = 4_000  # of a closed loop, whose latencies vary less
MOST = 100_000  # replicas
IDLE = 0.001  # of what it can do: hardly a request finds another one there
FULL = 0.95  # of the workers' time: beyond it, without bounds, the least burst makes a queue that does not end
WIDEST = 1.0  # coefficient of variation of a batch's time
SCALES = (0.5, 3.0)  # what a server may take of the time that its curve says; beyond them something else was measured


class Seen(NamedTuple):
    """What a server was measured to do at one load."""

    offered: Offered
    throughput: float
    p50_ms: float
    p99_ms: float


class Replica(NamedTuple):
    """One server as the benchmark ran it. `scale` is how many times its batches take what the curve says, and `cold_ms` how much longer
    one takes that wakes an idle worker; `overhead_ms` is a request's time outside of its worker."""

    timing: Timing
    configuration: Configuration
    cores: int
    limits: Limits
    queue_size: int = 100
    scale: float = 1.0
    cold_ms: float = 0.0
    overhead_ms: float = OVERHEAD_MS

    @property
    def times(self) -> list[float]:
        return [self.scale * self.timing.batch_ms(size) for size in range(1, self.limits.max_items + 1)]

    def slow(self, rate: float) -> list[float]:
        """How much so many workers that are at work slow each other, on the cores that the requests themselves leave to them."""
        left = max(self.cores - rate * self.overhead_ms / 1000, self.cores / 2)
        return [slowdown(self.timing, self.configuration, left, active) for active in range(self.configuration.workers + 1)]

    @property
    def capacity(self) -> float:
        return capacity(self.timing, self.configuration, self.cores) / self.scale


class Planned(NamedTuple):
    """`at` is what each of the replicas does at the rate asked for, `headroom` what it would do with the headroom used up."""

    replicas: int
    at: Simulated
    with_headroom: Simulated


def fitted(replica: Replica, best: Seen, alone: Seen | None = None, transport_ms: float | None = None) -> Replica:
    """As the server was, and not only its worker: by its best load, by what it did with one request at a time on one worker, and by the
    time between client and worker then. What is not known is left as it is."""
    replica = replica._replace(overhead_ms=OVERHEAD_MS if transport_ms is None else max(transport_ms, 0.0))
    replica = replica._replace(scale=_scale(replica, best))
    if alone is None or alone.p50_ms <= replica.overhead_ms or alone.p99_ms < alone.p50_ms:
        return replica
    work = alone.p50_ms - replica.overhead_ms
    sigma = math.log((alone.p99_ms - replica.overhead_ms) / work) / TAIL
    spread = min(math.sqrt(math.expm1(sigma**2)), WIDEST)
    cold = max(0.0, work - replica.scale * replica.timing.batch_ms(1))
    return replica._replace(cold_ms=cold, timing=replica.timing._replace(spread=spread))


def _scale(replica: Replica, seen: Seen) -> float:
    """How many times the curve's time a batch took on the server.

    In a closed loop everything is as much slower as the throughput is less; of an open one the median latency tells.
    """
    if seen.throughput <= 0 or seen.p50_ms <= 0:
        return 1.0
    if seen.offered.mode == "open":
        told = served(replica, poisson(seen.offered.rate or seen.throughput, CLOSED, seed=1))
        factor = seen.p50_ms / told.p50_ms if told.p50_ms else 1.0
    else:
        factor = _simulated(replica, range(CLOSED), seen.offered.connections, seen.throughput, 0).throughput / seen.throughput
    return min(max(factor, SCALES[0]), SCALES[1])


def served(replica: Replica, arrivals: Sequence[float], seed: int = 0) -> Simulated:
    span = arrivals[-1] - arrivals[0] if arrivals else 0.0
    return _simulated(replica, arrivals, 0, len(arrivals) / span if span > 0 else 0.0, seed)


def _simulated(replica: Replica, arrivals: Sequence[float], connections: int, rate: float, seed: int) -> Simulated:
    return simulate(
        replica.times,
        arrivals,
        workers=replica.configuration.workers,
        connections=connections,
        slow=replica.slow(rate),
        spread=replica.timing.spread,
        cold_ms=replica.cold_ms,
        overhead_ms=replica.overhead_ms,
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
