"""The waiting requests of one version, in the order in which they are served."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.plugins import BatchPolicy, Waiting
from tsx_runtime.wire import MetricDelta

NEVER = math.inf


class BatchLimits(NamedTuple):
    max_items: int = 1
    max_bytes: int = 64 << 20
    wait: float | None = None  # seconds that a request may wait for a batch to fill; None: no wait
    policy: BatchPolicy | None = None  # a plugin, which may end the wait earlier
    max_cost: float = NEVER  # limit of a batch's cost; one request alone may exceed it
    buckets: tuple[int, ...] = ()  # preferred numbers of requests


class Suspects(NamedTuple):
    """Requests with which a worker died.

    They run only among themselves, so that the cause does not affect other requests.
    """

    jobs: list[Job]
    deaths: int  # number of workers that have died with all of them


class RequestQueue:
    """Requests by priority, then deadline, then arrival; suspects precede all others.

    Without priorities and deadlines it is a plain deque, and a request costs one append. Otherwise,
    a request is also appended if it is not more urgent than the last one. Only a request that
    overtakes others needs a search.
    """

    __slots__ = ("earliest_deadline", "is_ordered", "jobs", "size", "some_clients_left", "suspects")

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self.jobs: deque[Job] = deque()
        self.suspects: deque[Suspects] = deque()
        self.size = 0  # bytes of the bodies of `jobs`
        # A lower limit of the waiting requests' deadlines. The request that had it may be gone.
        self.earliest_deadline = NEVER
        # Whether a request with a priority or a deadline has come since the queue was last empty.
        self.is_ordered = False
        # Whether a client may have left since the last `drop_expired`.
        self.some_clients_left = False
        for job in jobs:
            self.put(job, len(job.body))

    def __len__(self) -> int:
        return len(self.jobs) + sum(len(group.jobs) for group in self.suspects)

    def put(self, job: Job, size: int) -> None:
        """Add a request; `size` is the number of its body's bytes."""
        self.size += size
        if self.is_ordered or job.deadline is not None or job.priority:
            self._insert(job, before_equals=False)
        else:
            self.jobs.append(job)

    def put_back(self, jobs: list[Job]) -> None:
        """Return requests to their old places, before equally urgent ones."""
        for job in reversed(jobs):
            self.size += len(job.body)
            self._insert(job, before_equals=True)
        # Clients may have left while their jobs were with the worker.
        self.some_clients_left = True

    def suspect(self, groups: Iterable[Suspects]) -> None:
        self.suspects.extend(groups)
        # Clients may have left while their jobs were with the worker.
        self.some_clients_left = True
        self._recompute_deadline()

    def leave(self, job: Job) -> None:
        """Note that a client has left; `drop_expired` removes its job, if it is here."""
        job.gone = True
        self.some_clients_left = True

    def drop_expired(self, now: float) -> list[Job]:
        """Remove jobs whose client has left or whose deadline has passed.

        Such jobs can exist only if `some_clients_left` is set or `earliest_deadline` has passed.
        """
        all_jobs = [*self.jobs, *(job for group in self.suspects for job in group.jobs)]
        dropped = [job for job in all_jobs if _is_expired(job, now)]
        if dropped:
            self.jobs = deque(job for job in self.jobs if not _is_expired(job, now))
            self.size = sum(len(job.body) for job in self.jobs)
            groups = (
                Suspects([job for job in group.jobs if not _is_expired(job, now)], group.deaths)
                for group in self.suspects
            )
            self.suspects = deque(group for group in groups if group.jobs)
        self.some_clients_left = False
        self._recompute_deadline()
        return dropped

    def drop_last(self) -> Job:
        job = self.jobs.pop()
        self.size -= len(job.body)
        return job

    def drop_all(self) -> list[Job]:
        dropped = [*(job for group in self.suspects for job in group.jobs), *self.jobs]
        self.jobs.clear()
        self.suspects.clear()
        self._reset()
        return dropped

    def take(self, limits: BatchLimits) -> list[Job]:
        """Remove the next batch within the limits; one request alone may exceed `max_bytes`."""
        jobs = self.jobs
        if len(jobs) <= limits.max_items and self.size <= limits.max_bytes:
            batch = list(jobs)
            jobs.clear()
            if self.is_ordered:
                self._reset()
            else:
                self.size = 0
            return batch
        batch = []
        remaining_bytes = limits.max_bytes
        while jobs and len(batch) < limits.max_items:
            remaining_bytes -= len(jobs[0].body)
            if batch and remaining_bytes < 0:
                break
            batch.append(jobs.popleft())
        self.size -= sum([len(job.body) for job in batch])
        if not jobs:
            self._reset()
        return batch

    def learn(self, jobs: Sequence[Job], metrics: Sequence[MetricDelta]) -> None:
        """Learn the cost of requests from a worker's metrics; only a queue with costs does so."""

    def take_suspects(self) -> Suspects:
        group = self.suspects.popleft()
        if not self.jobs:
            self._reset()
        return group

    def has_full_batch(self, limits: BatchLimits) -> bool:
        """Tell whether the next batch is full, so that no later request could join it."""
        return len(self.jobs) >= limits.max_items or self.size > limits.max_bytes

    def departure_time(self, limits: BatchLimits, now: float) -> float:
        """Return when the next batch must leave: at once if it is full, else after the wait."""
        assert limits.wait is not None
        if self.has_full_batch(limits):
            return -NEVER
        latest_departure = min(
            [_latest_departure(job, limits.wait) for job in self.jobs], default=NEVER
        )
        if limits.policy is None or not self.jobs:
            return latest_departure
        longest_wait = now - min([job.arrived for job in self.jobs])
        return min(
            latest_departure,
            now
            + limits.policy(
                Waiting(len(self.jobs), self.size, longest_wait, limits.max_items, limits.wait)
            ),
        )

    def _insert(self, job: Job, *, before_equals: bool) -> None:
        jobs = self.jobs
        if job.deadline is not None and job.deadline < self.earliest_deadline:
            self.earliest_deadline = job.deadline
        self.is_ordered = self.is_ordered or job.deadline is not None or job.priority != 0
        key = urgency(job)
        if before_equals:
            jobs.insert(bisect_left(jobs, key, key=urgency), job)
        elif not jobs or urgency(jobs[-1]) <= key:
            jobs.append(job)
        else:
            jobs.insert(bisect_right(jobs, key, key=urgency), job)

    def _recompute_deadline(self) -> None:
        waiting = [*self.jobs, *(job for group in self.suspects for job in group.jobs)]
        self.earliest_deadline = min(
            (job.deadline for job in waiting if job.deadline is not None), default=NEVER
        )
        self.is_ordered = self.is_ordered and bool(self.jobs)

    def _reset(self) -> None:
        self.size = 0
        self.is_ordered = False
        if not self.suspects:
            self.earliest_deadline = NEVER


def urgency(job: Job) -> tuple[int, float]:
    """Return the key by which requests are sorted, the most urgent first."""
    return -job.priority, NEVER if job.deadline is None else job.deadline


def _is_expired(job: Job, now: float) -> bool:
    return job.gone or (job.deadline is not None and job.deadline <= now)


def _latest_departure(job: Job, wait: float) -> float:
    """Return when a request must leave: after the wait, or half of the time to its deadline."""
    if job.deadline is not None:
        wait = min(wait, (job.deadline - job.arrived) / 2)
    return job.arrived + wait
