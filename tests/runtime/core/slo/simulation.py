"""Simulates workers that take batches of a synthetic model: with a latency target, and with every fixed batch size and queue length."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.slo.control import HeldBatches, SloControl
from tsx_runtime.core.slo.curve import LatencyCurve

Service = Callable[[int, float], float]  # seconds of a batch of that size that begins then


class Case(NamedTuple):
    kind: str
    first: float  # seconds for one request
    each: float  # and for each further one
    limit: float  # of batches: of what hardware takes at once
    bound: float
    workers: int
    load: float  # of capacity
    seed: int

    def typical(self, size: int) -> float:
        return self.first + self.each * (size - 1)

    def service(self) -> Service:
        chance = np.random.default_rng(self.seed)
        noise = iter_of(lambda: chance.lognormal(0.0, 0.05, 4096))
        spread = iter_of(lambda: chance.random(4096))
        tail = iter_of(lambda: chance.lognormal(0.0, 0.35, 4096))

        def seconds(size: int, start: float) -> float:
            typical = self.typical(size) * next(noise)
            if self.kind == "bimodal":
                return typical * (1.6 if next(spread) < 0.2 else 1.0)
            if self.kind == "drifting":
                return typical * (1 + 0.3 * math.sin(start / 3))
            if self.kind == "heavy-tailed":
                return typical * next(tail)
            return typical

        return seconds

    def arrivals(self, rate: float, seconds: float) -> list[float]:
        chance = np.random.default_rng(self.seed + 1)
        return np.cumsum(chance.exponential(1 / rate, int(rate * seconds))).tolist()


def iter_of(more: Callable[[], np.ndarray]) -> Iterator[float]:
    while True:
        yield from more().tolist()


class Outcome(NamedTuple):
    offered: int
    accepted: int
    kept: int  # answered within the bound
    seconds: float
    latencies: list[float]

    @property
    def goodput(self) -> float:
        return self.kept / self.seconds

    @property
    def attainment(self) -> float:
        return self.kept / max(1, self.accepted)


def static(case: Case, arrivals: list[float], size: int, queue: int, warm: float) -> Outcome:
    """Batches of up to `size`, and a queue of `queue`: what comes beyond is refused."""
    service = case.service()
    free = [0.0] * case.workers
    waiting: list[float] = []
    position = accepted = kept = offered = 0
    latencies: list[float] = []
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
        batch = waiting[:size]
        del waiting[:size]
        done = start + service(len(batch), start)
        heapq.heapreplace(free, done)
        counted = batch if warm <= done <= end else []
        accepted += len(counted)
        kept += len(counted) - bisect_left(counted, done - case.bound)
        latencies += [done - arrived for arrived in counted]
    offered = len(arrivals) - bisect_left(arrivals, warm)
    return Outcome(offered, accepted, kept, end - warm, latencies)


def with_target(case: Case, arrivals: list[float], quantile: float, warm: float, curve: LatencyCurve | None = None) -> Outcome:
    """As `SloDispatcher` does it, but for batches that leave early."""
    control = SloControl(LatencyTarget("", quantile, case.bound), curve or LatencyCurve(quantile))
    service = case.service()
    workers: list[tuple[float, float, int, int]] = []  # busy ones: end, begin, size, requests that will be late
    waiting: list[float] = []
    accepted = kept = 0
    latencies: list[float] = []
    end = arrivals[-1]

    def begin(now: float) -> None:
        nonlocal accepted, kept
        while waiting and len(workers) < case.workers:
            size = control.batch_size(waiting, now, 1024)
            batch = waiting[: min(size, int(case.limit))]
            del waiting[: len(batch)]
            done = now + service(len(batch), now)
            heapq.heappush(workers, (done, now, len(batch), bisect_left(batch, done - case.bound)))
            control.sent(len(batch), cut=len(batch) < size and bool(waiting))
            counted = batch if warm <= done <= end else []
            accepted += len(counted)
            kept += len(counted) - bisect_left(counted, done - case.bound)
            latencies.extend([done - arrived for arrived in counted])

    def until(now: float) -> None:
        while workers and workers[0][0] <= now:
            done, began, size, late = heapq.heappop(workers)
            control.learn(size, done - began, done, case.workers, late)
            begin(done)

    for now in arrivals:
        until(now)
        control.offered()
        held = [HeldBatches(began, [size]) for _, began, size, _ in workers] + [HeldBatches(0.0, [])] * (case.workers - len(workers))
        if control.admits(waiting, held, now):
            waiting.append(now)
            begin(now)
    offered = len(arrivals) - bisect_left(arrivals, warm)
    return Outcome(offered, accepted, kept, end - warm, latencies)
