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
        """The number of batches that it holds; 0 means idle."""

    @property
    def prefetch(self) -> bool:
        """Whether it prepares a second batch while it runs the first."""

    @property
    def has_suspects(self) -> bool:
        """Whether it runs requests with which another worker died."""


SlotT = TypeVar("SlotT", bound=Slot)


# A special number of deaths, for a batch whose worker was stuck: it runs again once, unchanged.
BLAMELESS = -1


# A named tuple cannot be generic in Python 3.10.
@dataclass(slots=True)
class Assignment(Generic[SlotT]):
    """The decision of `assign`: which requests to send to which worker."""

    batches: list[tuple[SlotT, list[Job]]]
    retries: list[tuple[SlotT, Suspects]]
    # Requests to refuse, since their client has left or their deadline has passed.
    skipped: list[Job]
    # When to call `assign` again without an arrival: at a deadline, or at the end of a wait.
    wake_at: float


def assign(
    queue: RequestQueue,
    workers: Sequence[SlotT],
    now: float,
    limits: BatchLimits,
    allow_early: bool = True,
) -> Assignment[SlotT]:
    """Take the requests to send now out of `queue`; it has no other effect.

    Requests whose client has left or whose deadline has passed are skipped, even without a free
    worker. For each worker there are three cases:

    1. An idle worker takes all requests, up to the limits. Suspects go first, since they have
       waited longest. If the model configures a wait, a batch that is not full stays in the queue.
       It leaves when one of its requests has waited for `limits.wait`, or for half of the time
       until its deadline.
    2. A worker with one batch may take a second one early. It must be a full one, so that later
       requests can still join the next batch. `allow_early` must be set, and it must be the only
       worker: with several, the early batch could wait behind a slow one while another worker is
       idle. A worker that prepares batches needs neither condition unless another worker is idle,
       since the preparation saves time in each batch. Nothing is sent early behind suspects: after
       another death, both batches would be suspects. Nothing is sent early while a request has a
       deadline or a priority, since the queue cannot reorder requests that were sent.
    3. Any other worker takes nothing.
    """
    batches: list[tuple[SlotT, list[Job]]] = []
    retries: list[tuple[SlotT, Suspects]] = []
    skipped = (
        queue.drop_expired(now) if queue.some_clients_left or queue.earliest_deadline <= now else []
    )
    wake_at = NEVER
    for worker in workers:
        batch_count = worker.batches
        if batch_count == 0:
            if queue.suspects:
                retries.append((worker, queue.take_suspects()))
            elif not queue.jobs:
                break
            elif limits.wait is not None and (departure := queue.departure_time(limits, now)) > now:
                wake_at = departure
                break
            else:
                batches.append((worker, queue.take(limits)))
        elif (
            batch_count == 1
            and len(workers) == 1
            and (allow_early or worker.prefetch)
            and _can_send_early(queue, worker, limits)
        ):
            batches.append((worker, queue.take(limits)))
    if len(workers) > 1 and queue.has_full_batch(limits):
        # After the loop above, no worker is idle.
        for worker in workers:
            if worker.batches == 1 and worker.prefetch and _can_send_early(queue, worker, limits):
                batches.append((worker, queue.take(limits)))
    return Assignment(
        batches,
        retries,
        skipped,
        wake_at if wake_at < queue.earliest_deadline else queue.earliest_deadline,
    )


def _can_send_early(queue: RequestQueue, worker: Slot, limits: BatchLimits) -> bool:
    return not queue.is_ordered and not worker.has_suspects and queue.has_full_batch(limits)


def split_unstarted(jobs: list[Job]) -> list[Suspects]:
    """Return the groups of a batch that a worker was only preparing when it died.

    The cause may be this batch or the running one.
    """
    return halves(Suspects(jobs, 0)) or [Suspects(jobs, 1)]


def halves(group: Suspects) -> list[Suspects]:
    """Return the groups to try next when one more worker has died with a group.

    The group is first divided into two halves, then into single requests. Thus a request that kills
    workers ends at most three, and the other requests are answered. A single request is the cause,
    so there is no group left to try.
    """
    jobs, deaths = group
    if len(jobs) == 1:
        return []
    size = (len(jobs) + 1) // 2 if deaths <= 0 else 1
    return [
        Suspects(jobs[start : start + size], max(deaths, 0) + 1)
        for start in range(0, len(jobs), size)
    ]
