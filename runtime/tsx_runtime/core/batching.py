"""Which requests go to which worker now: the whole decision, without I/O and without a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from tsx_runtime.core.jobs import Job


class Slot(Protocol):
    """A worker as the batcher sees it."""

    @property
    def batches(self) -> int:
        """How many batches it holds: 0 = idle."""


SlotT = TypeVar("SlotT", bound=Slot)


class Limits(NamedTuple):
    max_items: int = 1
    max_bytes: int = 64 << 20
    wait: float | None = None  # seconds a request may wait for company; None: never


BLAMELESS = -1  # deaths of a batch that was with a worker that somebody stopped: it runs again as it is, once


class Suspects(NamedTuple):
    """Requests with which a worker died: they run among themselves, so that the one that did it takes no others with it."""

    jobs: list[Job]
    deaths: int  # workers that died with all of them, so far


@dataclass(slots=True)  # a named tuple cannot be generic in Python 3.10
class Assignment(Generic[SlotT]):
    batches: list[tuple[SlotT, list[Job]]]
    retries: list[tuple[SlotT, Suspects]]
    skipped: list[Job]  # their client is gone, or their deadline has passed: to be answered, not to be run
    wake: float | None  # when to ask again although nothing arrives; only where requests wait for company


def assign(
    queue: deque[Job], workers: Sequence[SlotT], now: float, limits: Limits, suspects: deque[Suspects] | None = None
) -> Assignment[SlotT]:
    """Take from `queue` and `suspects` what is to be done now; its only effect is that what it returns has left them.

    There are three cases for a worker:

    1. It is idle: it takes what is there, up to the caps; suspects first, as they have waited longest. Only where the
       model asks for company by name does it leave a batch that is not full, until the oldest request in it has waited
       for `limits.wait`.
    2. It holds one batch and is the model's only worker: it takes one more, early, but only a full one, so that late
       arrivals still join the next. With several workers a batch sent early could wait behind a slow one while another
       worker idles, so it stays in the queue.
    3. Otherwise it takes nothing.
    """
    batches: list[tuple[SlotT, list[Job]]] = []
    retries: list[tuple[SlotT, Suspects]] = []
    skipped: list[Job] = []
    for worker in workers:
        if suspects and worker.batches == 0 and (group := _take_suspects(suspects, now, skipped)):
            retries.append((worker, group))
            continue
        if not queue:
            continue
        if worker.batches == 0:
            if limits.wait is not None and (due := _due(queue, now, limits, skipped)) is not None and due > now:
                return Assignment(batches, retries, skipped, due)
            if batch := _take(queue, now, limits, skipped):
                batches.append((worker, batch))
        elif worker.batches == 1 and len(workers) == 1 and len(queue) >= limits.max_items:
            batch = _take(queue, now, limits, skipped)
            if len(batch) == limits.max_items:
                batches.append((worker, batch))
            else:
                queue.extendleft(reversed(batch))
    return Assignment(batches, retries, skipped, None)


def halves(group: Suspects) -> list[Suspects]:
    """The next groups to try when one more worker has died with this one.

    First two halves, then each request alone, so that one that kills workers has ended three at the most when it is found,
    and the others are answered. A request that was alone is found: nothing is left to try.
    """
    jobs, deaths = group
    if len(jobs) == 1:
        return []
    size = (len(jobs) + 1) // 2 if deaths <= 0 else 1
    return [Suspects(jobs[start : start + size], max(deaths, 0) + 1) for start in range(0, len(jobs), size)]


def _take_suspects(suspects: deque[Suspects], now: float, skipped: list[Job]) -> Suspects | None:
    while suspects:
        jobs, deaths = suspects.popleft()
        skipped += [job for job in jobs if _is_over(job, now)]
        if left := [job for job in jobs if not _is_over(job, now)]:
            return Suspects(left, deaths)
    return None


def _take(queue: deque[Job], now: float, limits: Limits, skipped: list[Job]) -> list[Job]:
    """The next batch: skip what nobody waits for, stop at a cap. One request alone may exceed the cap on bytes."""
    batch: list[Job] = []
    size = 0
    while queue and len(batch) < limits.max_items:
        job = queue[0]
        if _is_over(job, now):
            skipped.append(queue.popleft())
            continue
        size += len(job.body)
        if batch and size > limits.max_bytes:
            break
        batch.append(queue.popleft())
    return batch


def _due(queue: deque[Job], now: float, limits: Limits, skipped: list[Job]) -> float | None:
    """When the next batch must leave; None where nobody waits."""
    assert limits.wait is not None
    while queue and _is_over(queue[0], now):
        skipped.append(queue.popleft())
    if not queue:
        return None
    if len(queue) >= limits.max_items:
        return now
    return queue[0].arrived + limits.wait


def _is_over(job: Job, now: float) -> bool:
    return job.gone or (job.deadline is not None and job.deadline <= now)
