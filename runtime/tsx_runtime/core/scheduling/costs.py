"""The queue of a model whose batches have a limited cost, or preferred sizes.

See docs/guides/batching.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue
from tsx_runtime.wire import BATCH_COST, MetricDelta

# Requests of similar cost are chosen from the first requests of the queue: this many full batches.
WINDOW_BATCHES = 4
MEAN_WEIGHT = 0.9  # the weight of earlier measurements after each batch
# The pattern for a request's meta in lower case.
_HEADER = re.compile(rb"\r\nx-tsx-cost: *(\d{1,15}) *\r\n")


class CostQueue(RequestQueue):
    """A queue whose batches take the first request, and others of similar cost.

    Each request waits for at most as many batches as there were requests before it. Its cost is in
    its header `x-tsx-cost`, or else it is the number of its body's bytes times the cost of a byte.
    """

    __slots__ = ("_cost", "_max_cost", "_rate", "_size")

    def __init__(self, cost_per_byte: float, max_cost: float = 0) -> None:
        """Make an empty queue.

        Args:
            cost_per_byte: The cost of a byte until workers have measured it. If it is infinite,
                each request is a batch, since its bytes tell nothing about its cost.
            max_cost: The limit of a batch's cost, and of the value of a header. 0 means no limit,
                and that headers are not read.
        """
        super().__init__()
        self._max_cost = max_cost
        self._rate = cost_per_byte
        self._cost = self._size = 0.0  # weighted sums of measurements

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

    def has_full_batch(self, limits: BatchLimits) -> bool:
        if super().has_full_batch(limits):
            return True
        remaining_cost = limits.max_cost
        return remaining_cost < NEVER and any(
            (remaining_cost := remaining_cost - self.cost(job)) < 0 for job in self.jobs
        )

    def take(self, limits: BatchLimits) -> list[Job]:
        jobs = self.jobs
        window = list(islice(jobs, WINDOW_BATCHES * limits.max_items))
        costs = [self.cost(job) if limits.max_cost < NEVER else 0.0 for job in window]
        chosen_indexes = choose_batch(window, costs, len(jobs), limits)
        for _ in window:
            jobs.popleft()
        jobs.extendleft(
            job for index, job in reversed([*enumerate(window)]) if index not in chosen_indexes
        )
        batch = [window[index] for index in sorted(chosen_indexes)]
        self.size -= sum(len(job.body) for job in batch)
        if not jobs:
            self._reset()
        return batch


def choose_batch(
    window: Sequence[Job], costs: Sequence[float], waiting: int, limits: BatchLimits
) -> set[int]:
    """Choose a batch from `window`, the first of `waiting` requests; it has the very first.

    After the first one, requests of higher priority precede others, and then similar cost counts.
    """
    chosen_indexes: list[int] = []
    remaining_cost, remaining_bytes = limits.max_cost, limits.max_bytes
    for index in sorted(
        range(len(window)),
        key=lambda index: (
            index > 0,
            -window[index].priority,
            abs(costs[index] - costs[0]) if index else 0.0,
        ),
    ):
        remaining_cost, remaining_bytes = (
            remaining_cost - costs[index],
            remaining_bytes - len(window[index].body),
        )
        if chosen_indexes and (
            len(chosen_indexes) == limits.max_items or remaining_cost < 0 or remaining_bytes < 0
        ):
            break
        chosen_indexes.append(index)
    return set(
        chosen_indexes[
            : preferred_size(len(chosen_indexes), waiting - len(chosen_indexes), limits.buckets)
        ]
    )


def preferred_size(count: int, remaining: int, buckets: Sequence[int]) -> int:
    """Return how many of `count` requests a batch takes, if `remaining` ones wait in any case.

    It is a preferred size, unless a request would then wait longer than for the next batch.
    """
    size = max((size for size in buckets if size <= count), default=count)
    return size if remaining or size == count or count - size in buckets else count
