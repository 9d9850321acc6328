"""The assignment of queued requests to workers: a decision without I/O and without a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue, Suspects


class Slot(Protocol):
    """A worker as the batcher sees it."""

    @property
    def batches(self) -> int:
        """The number of batches that it holds; 0: idle."""

    @property
    def prefetch(self) -> bool:
        """Whether it prepares a second batch while it runs the first."""

    @property
    def suspected(self) -> bool:
        """Whether it works on requests with which a worker died."""


SlotT = TypeVar("SlotT", bound=Slot)


# The deaths of a batch whose worker was stopped: it runs again unchanged, once.
BLAMELESS = -1


# A named tuple cannot be generic in Python 3.10.
@dataclass(slots=True)
class Assignment(Generic[SlotT]):
    """The decision of `assign`: what to send to which worker."""

    batches: list[tuple[SlotT, list[Job]]]
    retries: list[tuple[SlotT, Suspects]]
    # Requests to refuse: their client has left, or their deadline has passed.
    skipped: list[Job]
    # The time of the next call without arrivals: a deadline, or the end of a wait to fill a batch.
    wake: float


def assign(
    queue: RequestQueue,
    workers: Sequence[SlotT],
    now: float,
    limits: BatchLimits,
    early: bool = True,
) -> Assignment[SlotT]:
    """Take the requests to send now out of `queue`; it has no other effect.

    Requests whose client has left or whose deadline has passed are skipped, even without a free
    worker. For each worker there are three cases:

    1. An idle worker takes all requests, up to the caps. Suspects go first, as they have waited
       longest. If the model configures a wait, a batch that is not full stays. It leaves when a
       request in it has waited for `limits.wait`, or for half of the time until its deadline.
    2. A worker with one batch may take one more early: only a full one, so that late arrivals
       still join the next. `early` must be set and it must be the only worker. With several
       workers, the early batch could wait behind a slow one while another worker idles. A worker
       that prepares batches needs neither, unless another is idle: it saves a share of each batch.
       Nothing is sent behind suspects, because after a death both batches would be suspects.
       Nothing is sent early while a request has a deadline or a priority, since the queue cannot
       reorder sent requests.
    3. Any other worker takes nothing.
    """
    batches: list[tuple[SlotT, list[Job]]] = []
    retries: list[tuple[SlotT, Suspects]] = []
    skipped = queue.drop_over(now) if queue.some_left or queue.earliest <= now else []
    wake = NEVER
    for worker in workers:
        held = worker.batches
        if held == 0:
            if queue.suspects:
                retries.append((worker, queue.take_suspects()))
            elif not queue.jobs:
                break
            elif limits.wait is not None and (due := queue.due(limits, now)) > now:
                wake = due
                break
            else:
                batches.append((worker, queue.take(limits)))
        elif (
            held == 1
            and len(workers) == 1
            and (early or worker.prefetch)
            and _may_go_early(queue, worker, limits)
        ):
            batches.append((worker, queue.take(limits)))
    if len(workers) > 1 and queue.fills(limits):
        # No worker is idle after the loop.
        for worker in workers:
            if worker.batches == 1 and worker.prefetch and _may_go_early(queue, worker, limits):
                batches.append((worker, queue.take(limits)))
    return Assignment(batches, retries, skipped, wake if wake < queue.earliest else queue.earliest)


def _may_go_early(queue: RequestQueue, worker: Slot, limits: BatchLimits) -> bool:
    return not queue.ordered and not worker.suspected and queue.fills(limits)


def split_unstarted(jobs: list[Job]) -> list[Suspects]:
    """Return the groups of a batch that a worker was only preparing when it died.

    Both this batch and the running one may be the cause.
    """
    return halves(Suspects(jobs, 0)) or [Suspects(jobs, 1)]


def halves(group: Suspects) -> list[Suspects]:
    """Return the groups to try next when one more worker has died with a group.

    These are two halves first, then single requests. A request that kills workers thus ends at most
    three, and the others are answered. A single request is the cause, so no group is left to try.
    """
    jobs, deaths = group
    if len(jobs) == 1:
        return []
    size = (len(jobs) + 1) // 2 if deaths <= 0 else 1
    return [
        Suspects(jobs[start : start + size], max(deaths, 0) + 1)
        for start in range(0, len(jobs), size)
    ]
