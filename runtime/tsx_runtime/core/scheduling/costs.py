"""The queue of a model whose batches have a bounded cost, or preferred sizes.

See docs/guides/batching.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue
from tsx_runtime.wire import BATCH_COST, MetricDelta

# Requests of similar cost are sought among so many times `max_items` requests.
WINDOW_BATCHES = 4
MEAN_WEIGHT = 0.9  # the weight of earlier measurements, per measured batch
# Matches a request's meta in lower case.
_HEADER = re.compile(rb"\r\nx-tsx-cost: *(\d{1,15}) *\r\n")


class CostQueue(RequestQueue):
    """A queue whose batches take the first request, and others of similar cost.

    Each request waits for at most as many batches as requests were before it. Its cost is that of
    its header `x-tsx-cost`, else the bytes of its body times the cost of a byte.
    """

    __slots__ = ("_cost", "_max_cost", "_rate", "_size")

    def __init__(self, cost_per_byte: float, max_cost: float = 0) -> None:
        """Make an empty queue.

        Args:
            cost_per_byte: The cost of a byte until workers have measured it. If it is infinite,
                each request is a batch, since bytes say nothing.
            max_cost: The limit of a batch, and of the value of a header; 0: no limit, and headers
                are not read.
        """
        super().__init__()
        self._max_cost = max_cost
        self._rate = cost_per_byte
        self._cost = self._size = 0.0  # sums of measurements

    def cost(self, job: Job) -> float:
        match = _HEADER.search(job.meta.lower()) if self._max_cost else None
        return (
            min(max(float(match[1]), 1.0), self._max_cost)
            if match
            else self._rate * max(len(job.body), 1)
        )

    def learn(self, jobs: Sequence[Job], metrics: Sequence[MetricDelta]) -> None:
        cost = sum(metric["value"] for metric in metrics if metric["name"] == BATCH_COST)
        if cost > 0:
            self._cost = MEAN_WEIGHT * self._cost + cost
            self._size = MEAN_WEIGHT * self._size + sum(max(len(job.body), 1) for job in jobs)
            self._rate = self._cost / self._size

    def fills(self, limits: BatchLimits) -> bool:
        if super().fills(limits):
            return True
        room = limits.max_cost
        return room < NEVER and any((room := room - self.cost(job)) < 0 for job in self.jobs)

    def take(self, limits: BatchLimits) -> list[Job]:
        jobs = self.jobs
        window = list(islice(jobs, WINDOW_BATCHES * limits.max_items))
        costs = [self.cost(job) if limits.max_cost < NEVER else 0.0 for job in window]
        chosen = choose(window, costs, len(jobs), limits)
        for _ in window:
            jobs.popleft()
        jobs.extendleft(job for at, job in reversed([*enumerate(window)]) if at not in chosen)
        batch = [window[at] for at in sorted(chosen)]
        self.size -= sum(len(job.body) for job in batch)
        if not jobs:
            self._reset()
        return batch


def choose(
    window: Sequence[Job], costs: Sequence[float], waiting: int, limits: BatchLimits
) -> set[int]:
    """Choose a batch from the first of `waiting` requests, beginning with the very first.

    More urgent requests go before those of similar cost.
    """
    chosen: list[int] = []
    cost, size = limits.max_cost, limits.max_bytes
    for at in sorted(
        range(len(window)),
        key=lambda at: (at > 0, -window[at].priority, abs(costs[at] - costs[0]) if at else 0.0),
    ):
        cost, size = cost - costs[at], size - len(window[at].body)
        if chosen and (len(chosen) == limits.max_items or cost < 0 or size < 0):
            break
        chosen.append(at)
    return set(chosen[: preferred(len(chosen), waiting - len(chosen), limits.buckets)])


def preferred(count: int, later: int, buckets: Sequence[int]) -> int:
    """Return how many of `count` requests a batch takes, if `later` ones wait in any case.

    It is a preferred size, unless a request would then wait longer than for the next batch.
    """
    size = max((size for size in buckets if size <= count), default=count)
    return size if later or size == count or count - size in buckets else count
