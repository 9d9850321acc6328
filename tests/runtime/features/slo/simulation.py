"""A simulation of workers that run batches, with a latency target or with fixed settings."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.models.latency_curve import LatencyCurve
from tsx_runtime.features.slo.control import SloControl, WorkerBatches

# A function from a batch's size and start time to its duration in seconds.
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
    # The load as a fraction of the capacity.
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
        """Requests per second, as `load` times the capacity of batches that take half the bound.

        The other half of the bound is for the queue.
        """
        half_bound_size = self._largest(self.bound / 2)
        return self.load * self.workers * half_bound_size / self.typical(half_bound_size)

    def _largest(self, seconds: float) -> int:
        return bisect_right(range(2, int(self.limit) + 1), seconds, key=self.typical) + 1

    def service(self) -> Service:
        chance = np.random.default_rng(self.seed)
        noise = repeat_draws(lambda: chance.lognormal(0.0, 0.05, 4096))
        uniform_draws = repeat_draws(lambda: chance.random(4096))
        lognormal_draws = repeat_draws(lambda: chance.lognormal(0.0, 0.35, 4096))

        def seconds(size: float, start: float) -> float:
            typical = self.typical(size) * next(noise)
            if self.kind == "bimodal":
                return typical * (1.6 if next(uniform_draws) < 0.2 else 1.0)
            if self.kind == "drifting":
                return typical * (1 + 0.3 * math.sin(start / 3))
            if self.kind == "heavy-tailed":
                return typical * next(lognormal_draws)
            return typical

        return seconds

    def arrivals(self, count: int) -> list[float]:
        chance = np.random.default_rng(self.seed + 1)
        return np.cumsum(chance.exponential(1 / self.rate, count)).tolist()


def repeat_draws(draw_block: Callable[[], np.ndarray]) -> Iterator[float]:
    while True:
        yield from draw_block().tolist()


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
    case: Case, arrivals: list[float], size: int, queue: int, delay: float, warmup_s: float
) -> Outcome:
    """Simulate batches of up to `size`; a worker waits up to `delay` for more requests.

    Requests beyond `queue` waiting ones are refused.
    """
    service = case.service()
    free_times = [0.0] * case.workers
    waiting: list[float] = []
    position = accepted = in_time = 0
    end = arrivals[-1]
    while position < len(arrivals) or waiting:
        start = free_times[0]
        if start > end:
            break
        next_position = bisect_right(arrivals, start, position)
        waiting += arrivals[position : min(next_position, position + queue - len(waiting))]
        position = next_position
        if not waiting:
            if position == len(arrivals):
                break
            start = arrivals[position]
            waiting.append(start)
            position += 1
        if len(waiting) < size and waiting[0] + delay > start:
            next_position = bisect_right(
                arrivals,
                waiting[0] + delay,
                position,
                min(len(arrivals), position + size - len(waiting)),
            )
            waiting += arrivals[position:next_position]
            position = next_position
            start = waiting[-1] if len(waiting) >= size else waiting[0] + delay
        batch = waiting[:size]
        del waiting[:size]
        end_s = start + service(len(batch), start)
        heapq.heapreplace(free_times, end_s)
        if warmup_s <= end_s <= end:
            accepted += len(batch)
            in_time += len(batch) - bisect_left(batch, end_s - case.bound)
    offered = len(arrivals) - bisect_left(arrivals, warmup_s)
    return Outcome(offered, accepted, in_time, end - warmup_s)


def simulate_target(
    case: Case,
    arrivals: list[float],
    quantile: float,
    warmup_s: float,
    costs: Sequence[float] = (),
    costs_known: bool = True,
    costs_matter: bool = True,
) -> Outcome:
    """Simulate the latency target of `SloDispatcher`, without batches that are sent ahead.

    The `costs` of requests are 1 on average; the control learns them if `costs_known`.
    A batch takes its time by the costs if `costs_matter`, or else by its size.
    """
    control = SloControl(LatencyTarget("", quantile, case.bound), LatencyCurve(quantile))
    service = case.service()
    # Busy workers: end, begin, weight, requests, requests that will be late, cost.
    workers: list[tuple[float, float, float, int, int, float]] = []
    waiting: list[float] = []
    waiting_costs: list[float] = []
    accepted = in_time = 0
    end = arrivals[-1]

    def weights() -> list[float]:
        return [control.weights.weigh(1, cost) for cost in waiting_costs] if control.weighs else []

    def begin(now: float) -> None:
        nonlocal accepted, in_time
        while waiting and len(workers) < case.workers:
            size = control.batch_size(waiting, now, 1024, weights())
            batch = waiting[: min(size, int(case.limit))]
            count = len(batch)
            cost = sum(waiting_costs[:count])
            del waiting[:count], waiting_costs[:count]
            end_s = now + service(cost if costs and costs_matter else count, now)
            weight = control.weights.weigh(count, cost)
            heapq.heappush(
                workers, (end_s, now, weight, count, bisect_left(batch, end_s - case.bound), cost)
            )
            control.sent(weight, cut=count < size and bool(waiting))
            if warmup_s <= end_s <= end:
                accepted += count
                in_time += count - bisect_left(batch, end_s - case.bound)

    def until(now: float) -> None:
        while workers and workers[0][0] <= now:
            end_s, start_s, _, size, late_count, cost = heapq.heappop(workers)
            control.learn(
                size, end_s - start_s, end_s, case.workers, late_count, cost if costs_known else 0.0
            )
            begin(end_s)

    for number, now in enumerate(arrivals):
        until(now)
        cost = costs[number] if costs else 0.0
        weight = control.weights.weigh(1, cost)
        control.count_arrival(weight)
        held_batches = [WorkerBatches(worker[1], [worker[2]]) for worker in workers] + [
            WorkerBatches(0.0, [])
        ] * (case.workers - len(workers))
        if control.admits(waiting, held_batches, now, weights, weight):
            waiting.append(now)
            waiting_costs.append(cost)
            begin(now)
    offered = len(arrivals) - bisect_left(arrivals, warmup_s)
    return Outcome(offered, accepted, in_time, end - warmup_s)
