"""A model of one measured server: what its worker's curve does not show is fitted to the measured loads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_cli.bench.model.configuration import Configuration
from tsx_cli.bench.model.predict import OVERHEAD_MS, Timing, capacity, slowdown
from tsx_cli.bench.model.results import Observation, ServedBatches
from tsx_cli.bench.model.simulate import UNCOUNTED, SimulationResult, poisson, simulate
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.core.slo.control import SloControl
from tsx_runtime.core.slo.curve import SIZES, LatencyCurve

REQUESTS = 4_000  # that are simulated of a load that is compared
TAIL_REQUESTS = 12_000  # where their p99 is
CALM = 0.5  # of what it can do: a rate below this finds idle workers, one above it tells how they do in a row
SCALES = (0.5, 3.0)  # what a server may take of the time that its curve says; beyond them something else was measured
SURE, UNSURE, MOST_UNSURE = 0.03, 0.1, 0.5  # of a batch's time: what it is never better known than, in one round, and never worse
KEEPS_UP = 0.9  # of the rate: a server that answers less is overloaded, and its latency is the time that the load has lasted
MOST_CROWDED = 20.0
STEPS = 6  # halvings on the way to a figure
TWICE = 1.96  # standard deviations, within which 95 % are
LONGEST_WAY = 0.25  # of the time of a request, that the way to a worker which has idled takes longer at most
TURNS = 3  # of fitting: quicker batches are smaller ones as well, and how workers in a row do and how idle ones do hang on each other


class Replica(NamedTuple):
    """One server. `scale` is how many times its batches take what the curve says, and `drift` how that differs between rounds: the standard
    deviation of its logarithm; None where nothing tells. `extra_ms` is what single batches take more than their median while the server is
    alone with one client, and `crowded` how many times that is added at full load. A batch takes `cold_ms` longer on a worker that has
    idled, and the way to such a one and back `wake_ms`; `overhead_ms` is a request's time outside of a worker that has not. With a latency
    `target`, batches and refusals are those of a server that keeps it.
    """

    timing: Timing
    configuration: Configuration
    cores: int
    limits: BatchLimits
    queue_size: int = 100
    scale: float = 1.0
    extra_ms: tuple[float, ...] = ()
    crowded: float = 0.0
    drift: float | None = None
    cold_ms: float = 0.0
    wake_ms: float = 0.0
    overhead_ms: float = OVERHEAD_MS
    target: LatencyTarget | None = None

    @property
    def times(self) -> list[float]:
        return [self.scale * self.timing.batch_ms(size) for size in range(1, self.limits.max_items + 1)]

    def slow(self, rate: float) -> list[float]:
        """How much so many workers that are at work slow each other, on the cores that the requests themselves leave to them."""
        left = max(self.cores - rate * self.overhead_ms / 1000, self.cores / 2)
        return [slowdown(self.timing, self.configuration, left, active) for active in range(self.configuration.workers + 1)]

    @property
    def capacity(self) -> float:
        """Requests per second with all workers at work on full batches."""
        size, workers = self.limits.max_items, self.configuration.workers
        most = capacity(self.timing, replace(self.configuration, batch_size=size), self.cores) / self.scale
        return most / (1 + most / size / workers * fmean(self.extras(most)) / 1000) if self.extra_ms else most

    @property
    def quickest_and_slowest(self) -> tuple[Replica, Replica]:
        """As it would be in single rounds of a benchmark: 19 of 20 are between, if they are as those before."""
        half = min(max(UNSURE if self.drift is None else TWICE * self.drift, SURE), MOST_UNSURE)
        return self.as_slow(math.exp(-half)), self.as_slow(math.exp(half))

    def extras(self, rate: float) -> list[float]:
        """`extra_ms` at so many requests a second."""
        most = capacity(self.timing, self.configuration, self.cores) / self.scale
        times = 1 + self.crowded * min(rate / most, 1.0)
        return [each if each < 0 else times * each for each in self.extra_ms]

    def of(self, configuration: Configuration) -> Replica:
        return self._replace(configuration=configuration, limits=self.limits._replace(max_items=configuration.batch_size))

    def under(self, target: LatencyTarget) -> Replica:
        """With batches as large as the target of the model allows."""
        return self._replace(target=target, limits=self.limits._replace(max_items=SIZES[-1]))

    def control(self) -> SloControl | None:
        """As the server begins with a latency target and a benchmark's curve."""
        if self.target is None:
            return None
        measured = [(size, self.scale * self.timing.batch_ms(size) / 1000) for size in self.timing.sizes]
        return SloControl(self.target, LatencyCurve(self.target.quantile, measured, self.timing.spread))

    def __str__(self) -> str:
        how = self.configuration
        return str(how) if self.target is None else str(how).replace(f"batch {how.batch_size}", f"slo {self.target.text}")

    def as_slow(self, times: float) -> Replica:
        return self._replace(scale=self.scale * times)


def served(
    replica: Replica,
    arrivals: Sequence[float],
    seed: int = 0,
    *,
    connections: int = 0,
    rate: float | None = None,
    uncounted: float = UNCOUNTED,
) -> SimulationResult:
    """`arrivals` in seconds; with `connections` as many requests in a closed loop, which comes to about so many a second at a `rate`."""
    if rate is None:
        span = arrivals[-1] - arrivals[0] if arrivals else 0.0
        rate = len(arrivals) / span if span > 0 else 0.0
    return simulate(
        replica.times,
        arrivals,
        workers=replica.configuration.workers,
        connections=connections,
        slow=replica.slow(rate),
        spread=replica.timing.spread,
        extra_ms=replica.extras(rate),
        drift=replica.drift or 0.0,
        cold_ms=replica.cold_ms,
        wake_ms=replica.wake_ms,
        overhead_ms=replica.overhead_ms,
        limits=replica.limits,
        queue_size=replica.queue_size,
        control=replica.control(),
        uncounted=uncounted,
        seed=seed,
    )


def resimulated(replica: Replica, seen: Observation, seed: int = 1, requests: int = REQUESTS) -> SimulationResult:
    """What the simulation says of a load that was measured."""
    if seen.offered.mode == "open":
        return served(replica, poisson(seen.offered.rate or seen.throughput, requests, seed), seed)
    return served(replica, range(requests), seed, connections=seen.offered.connections, rate=seen.throughput)


def fitted(replica: Replica, loads: Sequence[Observation], alone: Sequence[float] = (), transport_ms: float | None = None) -> Replica:
    """As the server was, and not only its worker, by the rounds of its `loads`; by the latencies of single requests `alone` on one worker,
    as quantiles evenly apart; and by the time between client and worker then. What is not known is left as it is.

    Loads of requests that come at random go before closed loops, in which batches take less: all that a request needs was used just now.
    """
    replica = replica._replace(overhead_ms=OVERHEAD_MS if transport_ms is None else max(transport_ms, 0.0))
    replica = replica._replace(extra_ms=_extras(alone, replica.overhead_ms))
    own = [each for each in loads if each.matches(replica.configuration) and each.throughput > 0 and each.p50_ms > 0]
    closed = [each for each in own if each.offered.mode == "closed"]
    at_random = [each for each in own if each.offered.mode == "open" and each.served is not None]
    replica = _in_a_row(replica, closed)
    calm = [each for each in at_random if each.throughput < CALM * replica.capacity]
    busy = [each for each in at_random if each not in calm] or closed
    for _ in range(TURNS):
        replica = _in_a_row(replica, busy)
        replica = _idling(replica, calm)
        replica = _crowded(replica, at_random)
    return replica._replace(drift=_drift(replica, own))


def _extras(alone: Sequence[float], overhead_ms: float) -> tuple[float, ...]:
    if not alone or min(alone) <= overhead_ms:
        return ()
    middle = median(alone)
    return tuple(each - middle for each in alone)


def _in_a_row(replica: Replica, loads: Sequence[Observation]) -> Replica:
    """Of workers that have always something to do: how many times as long as the curve says."""
    logs = [math.log(_ratio(replica, seen, resimulated(replica, seen))) for seen in _together(loads)]
    if not logs:
        return replica
    return replica._replace(scale=min(max(replica.scale * math.exp(fmean(logs)), SCALES[0]), SCALES[1]))


def _together(loads: Sequence[Observation]) -> list[Observation]:
    """Rounds of the same load as one."""
    rounds: dict[str, list[Observation]] = {}
    for seen in loads:
        rounds.setdefault(seen.offered.model_dump_json(), []).append(seen)
    return [_mean(each) for each in rounds.values()]


def _mean(rounds: Sequence[Observation]) -> Observation:
    served = [each.served for each in rounds if each.served is not None]
    sizes = {size: sum(each.batches.get(size, 0) for each in served) for size in sorted({size for each in served for size in each.batches})}
    return rounds[0].model_copy(
        update={
            "throughput": fmean(each.throughput for each in rounds),
            "p50_ms": fmean(each.p50_ms for each in rounds),
            "p99_ms": median(each.p99_ms for each in rounds),
            "served": ServedBatches(batch_ms=fmean(each.batch_ms for each in served), batches=sizes) if served else None,
        }
    )


def _ratio(replica: Replica, seen: Observation, simulated: SimulationResult) -> float:
    """How many times the time that the simulation says a batch took.

    In a closed loop everything is as much slower as the throughput is less. Of an open one the server tells how long batches took, and of
    how many requests they were: its latencies hang on how requests happened to come.
    """
    if seen.offered.mode == "closed" or seen.served is None:
        return simulated.throughput / seen.throughput
    return seen.served.batch_ms / simulated.batch_ms * _usual(replica, simulated.batch_sizes) / _usual(replica, seen.served.batches)


def _usual(replica: Replica, batches: Mapping[int, int]) -> float:
    """Milliseconds that the batch of a request takes by the curve, where they are of these sizes, as the server counts them: a size with
    all others up to the next power of two."""
    counted = [(size * count, replica.timing.batch_ms(1 << (size - 1).bit_length())) for size, count in batches.items()]
    requests = sum(weight for weight, _ in counted)
    return sum(weight * took for weight, took in counted) / requests if requests else 1.0


def _idling(replica: Replica, loads: Sequence[Observation]) -> Replica:
    """By loads under which workers idle: what their batches take longer, and then what is left of the median latency."""
    most = replica.times[0]
    for seen in _together(loads)[:1]:
        low, high = 0.0, most
        for _ in range(STEPS):
            replica = replica._replace(cold_ms=(low + high) / 2)
            too_little = _ratio(replica, seen, resimulated(replica, seen)) > 1
            low, high = (replica.cold_ms, high) if too_little else (low, replica.cold_ms)
        none, one = (resimulated(replica._replace(wake_ms=each), seen).p50_ms for each in (0.0, most))
        share = (seen.p50_ms - none) / (one - none) if one != none else 0.0  # of the way from none to one
        replica = replica._replace(wake_ms=min(max(share, 0.0), LONGEST_WAY) * most)
    return replica


def _crowded(replica: Replica, loads: Sequence[Observation]) -> Replica:
    """By the p99 of requests that come at random. The front end, the clients and the other workers want the same cores, so what holds up a
    batch lasts longer under load. Medians and means, by which the rest is fitted, hardly show that.
    """
    seen = [each for each in _together(loads) if each.p99_ms > 0 and each.throughput > KEEPS_UP * (each.offered.rate or 0.0)]
    if not seen or not replica.extra_ms:
        return replica

    low, high = 0.0, MOST_CROWDED
    for _ in range(STEPS):
        replica = replica._replace(crowded=(low + high) / 2)
        ratios = [resimulated(replica, each, requests=TAIL_REQUESTS).p99_ms / each.p99_ms for each in seen]
        too_much = fmean(map(math.log, ratios)) > 0
        low, high = (low, replica.crowded) if too_much else (replica.crowded, high)
    return replica


def _drift(replica: Replica, loads: Sequence[Observation]) -> float | None:
    """How the time of a batch differs between rounds of the same load, as the standard deviation of its logarithm."""
    rounds: dict[str, list[float]] = {}
    for seen in loads:
        if seen.offered.mode == "closed":
            rounds.setdefault(seen.offered.model_dump_json(), []).append(-math.log(seen.throughput))
        elif seen.served is not None:
            took = seen.served.batch_ms / _usual(replica, seen.served.batches)
            rounds.setdefault(seen.offered.model_dump_json(), []).append(math.log(took))
    freedom = sum(len(logs) - 1 for logs in rounds.values())
    return math.sqrt(sum((each - fmean(logs)) ** 2 for logs in rounds.values() for each in logs) / freedom) if freedom else None
