"""The queue of a model whose batches are bounded by the cost of their requests, or have preferred
sizes (docs/guides/batching.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue
from tsx_runtime.wire import BATCH_COST, MetricDelta

AHEAD = 4  # batches of `max_items` requests, among which those of like cost are looked for
MEMORY = 0.9  # the weight of what was measured before, with each batch that is measured
_HEADER = re.compile(rb"\r\nx-tsx-cost: *(\d{1,15}) *\r\n")  # in a request's meta in lower case


class CostQueue(RequestQueue):
    """A batch takes the first request and those of like cost, so that each waits for no more
    batches than requests stood before it.

    A request costs what its header `x-tsx-cost` says, else the bytes of its body times the cost of
    a byte.
    """

    __slots__ = ("_cost", "_most", "_rate", "_size")

    def __init__(self, cost_per_byte: float, most: float = 0) -> None:
        """`cost_per_byte`: until workers have measured it.

        Infinite where bytes say nothing: each request is a batch then.

        `most`: of a batch, and so the most that a header is believed; 0: there is no bound, and no
        header is read.
        """
        super().__init__()
        self._most = most
        self._rate = cost_per_byte
        self._cost = self._size = 0.0  # measured

    def cost(self, job: Job) -> float:
        found = _HEADER.search(job.meta.lower()) if self._most else None
        return (
            min(max(float(found[1]), 1.0), self._most)
            if found
            else self._rate * max(len(job.body), 1)
        )

    def learn(self, jobs: Sequence[Job], metrics: Sequence[MetricDelta]) -> None:
        cost = sum(metric["value"] for metric in metrics if metric["name"] == BATCH_COST)
        if cost > 0:
            self._cost = MEMORY * self._cost + cost
            self._size = MEMORY * self._size + sum(max(len(job.body), 1) for job in jobs)
            self._rate = self._cost / self._size

    def fills(self, limits: BatchLimits) -> bool:
        if super().fills(limits):
            return True
        room = limits.max_cost
        return room < NEVER and any((room := room - self.cost(job)) < 0 for job in self.jobs)

    def take(self, limits: BatchLimits) -> list[Job]:
        jobs = self.jobs
        window = list(islice(jobs, AHEAD * limits.max_items))
        costs = [self.cost(job) if limits.max_cost < NEVER else 0.0 for job in window]
        chosen = choose(window, costs, len(jobs), limits)
        for _ in window:
            jobs.popleft()
        jobs.extendleft(job for at, job in reversed([*enumerate(window)]) if at not in chosen)
        batch = [window[at] for at in sorted(chosen)]
        self.size -= sum(len(job.body) for job in batch)
        if not jobs:
            self._emptied()
        return batch


def choose(
    window: Sequence[Job], costs: Sequence[float], waiting: int, limits: BatchLimits
) -> set[int]:
    """Of the first of `waiting` requests, those that make a batch with the very first: the more
    urgent before those of like cost.
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


def preferred(count: int, left: int, buckets: Sequence[int]) -> int:
    """How many of so many requests a batch takes where `left` others wait in any case.

    A preferred size, unless one of these would wait for longer than until the next batch.
    """
    size = max((size for size in buckets if size <= count), default=count)
    return size if left or size == count or count - size in buckets else count
