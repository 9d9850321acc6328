"""Assigns queued requests to workers: the whole decision, without I/O and without a clock."""

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
        """How many batches it holds: 0 = idle."""

    @property
    def prefetch(self) -> bool:
        """Whether it prepares a second batch while it runs the first."""

    @property
    def suspected(self) -> bool:
        """Whether it works on requests with which a worker died."""


SlotT = TypeVar("SlotT", bound=Slot)


BLAMELESS = (
    -1
)  # deaths of a batch that was with a worker that was stopped: it runs again as it is, once


@dataclass(slots=True)  # a named tuple cannot be generic in Python 3.10
class Assignment(Generic[SlotT]):
    batches: list[tuple[SlotT, list[Job]]]
    retries: list[tuple[SlotT, Suspects]]
    skipped: list[
        Job
    ]  # their client is gone, or their deadline has passed: to be answered, not to be run
    # when to ask again although nothing arrives: for a deadline, or where requests wait to fill a
    # batch
    wake: float


def assign(
    queue: RequestQueue,
    workers: Sequence[SlotT],
    now: float,
    limits: BatchLimits,
    early: bool = True,
) -> Assignment[SlotT]:
    """Take from `queue` what is to be done now; its only effect is that what it returns has left
    the queue.

    Requests whose client is gone or whose deadline has passed are skipped, whether a worker is
    there for them or not. Then there are three cases for a worker:

    1. It is idle: it takes what is there, up to the caps; suspects first, as they have waited
       longest. Only where the model configures a wait does it leave a batch that is not full, until
       one request in it has waited for `limits.wait`, or for half of the time until its deadline.
    2. It holds one batch and is the model's only worker: it takes one more, early, but only a full
       one, so that late arrivals still join the next. With several workers a batch sent early could
       wait behind a slow one while another worker idles, so it stays in the queue, unless the
       worker would prepare it meanwhile and no other is idle. Behind suspects it stays as well:
       should the worker die, it is not to be asked which of the two batches did it. No rule of the
       queue reaches what was sent. So nothing is sent early while a request there has a deadline or
       a priority, nor where `early` is not set, except to a worker that prepares it: that saves a
       share of each batch, however long it is, and not only the way to the worker.
    3. Otherwise it takes nothing.
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
    if len(workers) > 1 and queue.fills(limits):  # after the loop: no worker is idle now
        for worker in workers:
            if worker.batches == 1 and worker.prefetch and _may_go_early(queue, worker, limits):
                batches.append((worker, queue.take(limits)))
    return Assignment(batches, retries, skipped, wake if wake < queue.earliest else queue.earliest)


def _may_go_early(queue: RequestQueue, worker: Slot, limits: BatchLimits) -> bool:
    return not queue.ordered and not worker.suspected and queue.fills(limits)


def apart(jobs: list[Job]) -> list[Suspects]:
    """The groups of a batch that a worker was only preparing when it died: it may have been the
    cause, as much as the batch that ran.
    """
    return halves(Suspects(jobs, 0)) or [Suspects(jobs, 1)]


def halves(group: Suspects) -> list[Suspects]:
    """The next groups to try when one more worker has died with this one.

    First two halves, then each request alone, so that one that kills workers has ended three at
    most when it is found, and the others are answered. A request that was alone is found: nothing
    is left to try.
    """
    jobs, deaths = group
    if len(jobs) == 1:
        return []
    size = (len(jobs) + 1) // 2 if deaths <= 0 else 1
    return [
        Suspects(jobs[start : start + size], max(deaths, 0) + 1)
        for start in range(0, len(jobs), size)
    ]
