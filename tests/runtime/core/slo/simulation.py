"""A simulation of workers that take batches, with a latency target and with fixed settings."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.slo.control import SloControl, WorkerBatches
from tsx_runtime.core.slo.curve import LatencyCurve

# Seconds that a batch takes, from its size and the time at which it begins.
Service = Callable[[float, float], float]


class Case(NamedTuple):
    kind: str
    first: float  # seconds for one request
    # Seconds for each further request; the exponent of a concave curve.
    further: float
    # The largest batch that the hardware takes.
    limit: float
    bound: float
    workers: int
    # The load as a share of the capacity.
    load: float
    seed: int

    def typical(self, size: float) -> float:
        if self.kind == "concave":
            return self.first * size**self.further
        return self.first + self.further * (size - 1)

    @property
    def largest(self) -> int:
        """The largest batch that takes no longer than the bound."""
        return self._largest(self.bound)

    @property
    def rate(self) -> float:
        """Requests a second, of which the capacity is that of batches of half the bound.

        The other half of the bound is for the queue.
        """
        half = self._largest(self.bound / 2)
        return self.load * self.workers * half / self.typical(half)

    def _largest(self, seconds: float) -> int:
        return bisect_right(range(2, int(self.limit) + 1), seconds, key=self.typical) + 1

    def service(self) -> Service:
        chance = np.random.default_rng(self.seed)
        noise = repeat_draws(lambda: chance.lognormal(0.0, 0.05, 4096))
        spread = repeat_draws(lambda: chance.random(4096))
        tail = repeat_draws(lambda: chance.lognormal(0.0, 0.35, 4096))

        def seconds(size: float, start: float) -> float:
            typical = self.typical(size) * next(noise)
            if self.kind == "bimodal":
                return typical * (1.6 if next(spread) < 0.2 else 1.0)
            if self.kind == "drifting":
                return typical * (1 + 0.3 * math.sin(start / 3))
            if self.kind == "heavy-tailed":
                return typical * next(tail)
            return typical

        return seconds

    def arrivals(self, count: int) -> list[float]:
        chance = np.random.default_rng(self.seed + 1)
        return np.cumsum(chance.exponential(1 / self.rate, count)).tolist()


def repeat_draws(more: Callable[[], np.ndarray]) -> Iterator[float]:
    while True:
        yield from more().tolist()


class Outcome(NamedTuple):
    offered: int
    accepted: int
    in_time: int  # answered within the bound
    seconds: float

    @property
    def goodput(self) -> float:
        return self.in_time / self.seconds

    @property
    def attainment(self) -> float:
        return self.in_time / max(1, self.accepted)


def simulate_fixed(
    case: Case, arrivals: list[float], size: int, queue: int, delay: float, warm: float
) -> Outcome:
    """Simulate batches of up to `size`, for which a worker waits up to `delay`.

    Requests beyond the `queue` are refused.
    """
    service = case.service()
    free = [0.0] * case.workers
    waiting: list[float] = []
    position = accepted = in_time = 0
    end = arrivals[-1]
    while position < len(arrivals) or waiting:
        start = free[0]
        if start > end:
            break
        more = bisect_right(arrivals, start, position)
        waiting += arrivals[position : min(more, position + queue - len(waiting))]
        position = more
        if not waiting:
            if position == len(arrivals):
                break
            start = arrivals[position]
            waiting.append(start)
            position += 1
        if len(waiting) < size and waiting[0] + delay > start:
            more = bisect_right(
                arrivals,
                waiting[0] + delay,
                position,
                min(len(arrivals), position + size - len(waiting)),
            )
            waiting += arrivals[position:more]
            position = more
            start = waiting[-1] if len(waiting) >= size else waiting[0] + delay
        batch = waiting[:size]
        del waiting[:size]
        done = start + service(len(batch), start)
        heapq.heapreplace(free, done)
        if warm <= done <= end:
            accepted += len(batch)
            in_time += len(batch) - bisect_left(batch, done - case.bound)
    offered = len(arrivals) - bisect_left(arrivals, warm)
    return Outcome(offered, accepted, in_time, end - warm)


def simulate_target(
    case: Case,
    arrivals: list[float],
    quantile: float,
    warm: float,
    costs: Sequence[float] = (),
    known: bool = True,
    matters: bool = True,
) -> Outcome:
    """Simulate a latency target as `SloDispatcher` keeps it, without batches that leave early.

    The `costs` of requests are 1 on average. The control is told of them if they are `known`.
    Batches take their time by their costs if it `matters`, or else by their sizes.
    """
    control = SloControl(LatencyTarget("", quantile, case.bound), LatencyCurve(quantile))
    service = case.service()
    # Busy workers: end, begin, weight, requests, requests that will be late, cost.
    workers: list[tuple[float, float, float, int, int, float]] = []
    waiting: list[float] = []
    theirs: list[float] = []
    accepted = in_time = 0
    end = arrivals[-1]

    def weights() -> list[float]:
        return [control.weights.weigh(1, cost) for cost in theirs] if control.weighs else []

    def begin(now: float) -> None:
        nonlocal accepted, in_time
        while waiting and len(workers) < case.workers:
            size = control.batch_size(waiting, now, 1024, weights())
            batch = waiting[: min(size, int(case.limit))]
            count = len(batch)
            cost = sum(theirs[:count])
            del waiting[:count], theirs[:count]
            done = now + service(cost if costs and matters else count, now)
            weight = control.weights.weigh(count, cost)
            heapq.heappush(
                workers, (done, now, weight, count, bisect_left(batch, done - case.bound), cost)
            )
            control.sent(weight, cut=count < size and bool(waiting))
            if warm <= done <= end:
                accepted += count
                in_time += count - bisect_left(batch, done - case.bound)

    def until(now: float) -> None:
        while workers and workers[0][0] <= now:
            done, began, _, size, late, cost = heapq.heappop(workers)
            control.learn(size, done - began, done, case.workers, late, cost if known else 0.0)
            begin(done)

    for number, now in enumerate(arrivals):
        until(now)
        cost = costs[number] if costs else 0.0
        weight = control.weights.weigh(1, cost)
        control.count_arrival(weight)
        held = [WorkerBatches(worker[1], [worker[2]]) for worker in workers] + [
            WorkerBatches(0.0, [])
        ] * (case.workers - len(workers))
        if control.admits(waiting, held, now, weights, weight):
            waiting.append(now)
            theirs.append(cost)
            begin(now)
    offered = len(arrivals) - bisect_left(arrivals, warm)
    return Outcome(offered, accepted, in_time, end - warm)
