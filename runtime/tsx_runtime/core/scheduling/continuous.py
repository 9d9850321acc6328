"""Dispatch to workers whose running requests others may join.

These are workers with continuous batching or an asynchronous handler. `join` makes the decisions of
`JoiningDispatcher`, as `assign` does for `Dispatcher`: without I/O and without a clock.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence

from tsx_runtime import wire
from tsx_runtime.core.scheduling.batching import Assignment, SlotT, halves
from tsx_runtime.core.scheduling.channel import Channel, SentBatch
from tsx_runtime.core.scheduling.dispatcher import Bounds, Dispatcher
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.multiplexed_channel import OpenChannel
from tsx_runtime.core.scheduling.queue import BatchLimits, RequestQueue, Suspects
from tsx_runtime.errors import TsxError, WorkerDied

# Workers that died with one request: at first, twice to find the cause, and one by accident.
MAX_DEATHS = 4


def join(
    queue: RequestQueue, workers: Sequence[SlotT], now: float, limits: BatchLimits
) -> Assignment[SlotT]:
    """Take the requests to send now out of `queue`; it has no other effect.

    The `batches` of a slot are the running requests of its worker, at most `limits.max_items`.

    1. Suspects go first. A group goes to the worker with the fewest running requests that has
       none in quarantine. Further requests join only after the quarantine. While a group waits for
       room, the worker with the fewest requests takes nothing else.
    2. Each request goes to the worker with the fewest running requests that has room, in the
       queue's order. Nothing waits to fill a batch.
    """
    skipped = queue.drop_over(now) if queue.some_left or queue.earliest <= now else []
    load = {index: worker.batches for index, worker in enumerate(workers) if not worker.suspected}
    retries: list[tuple[SlotT, Suspects]] = []
    while queue.suspects and load:
        index = min(load, key=lambda index: load[index])
        held = load.pop(index)
        if held and held + len(queue.suspects[0].jobs) > limits.max_items:
            break
        retries.append((workers[index], queue.take_suspects()))
    taken: dict[int, list[Job]] = {}
    single = BatchLimits(1, limits.max_bytes)
    while queue.jobs and load:
        index = min(load, key=lambda index: load[index])
        if load[index] >= limits.max_items:
            break
        taken.setdefault(index, []).extend(queue.take(single))
        load[index] += 1
    batches = [(workers[index], jobs) for index, jobs in taken.items()]
    return Assignment(batches, retries, skipped, queue.earliest)


def blame(unanswered: list[Job], blamed: list[Job], lost: int) -> list[Suspects]:
    """Return the groups to try after a worker died with `lost` requests.

    Args:
        unanswered: The lost requests whose answer had not begun.
        blamed: Those of them that were in quarantine. They are the suspects, each on its own; a
            single one is the cause. Without any, all are suspects, in halves.
        lost: The number of requests; the only request of a worker is the cause.
    """
    if blamed:
        return halves(Suspects(blamed, 1))
    if len(unanswered) == 1:
        return [Suspects(unanswered, 1)] if lost > 1 else []
    return halves(Suspects(unanswered, 0)) if unanswered else []


class JoiningDispatcher(Dispatcher):
    """The dispatcher of a version whose workers let requests join running ones.

    Each request has `response_timeout` for itself, counted again from each piece of its answer.

    Requests of a worker that died are tried again unless their answer had begun: first in halves,
    then alone, during a quarantine. Requests in quarantine are blamed when another worker dies. One
    that kills later affects others. No request is tried more than `MAX_DEATHS` times.
    """

    def __init__(self, label: str, limits: BatchLimits, bounds: Bounds) -> None:
        super().__init__(label, limits, bounds)
        self._watch: asyncio.TimerHandle | None = None  # the timer for overdue answers
        self._deaths: Counter[Job] = Counter()  # workers that died with a request
        self._blamed: set[Job] = set()  # requests in quarantine when a worker died

    def new_channel(self) -> Channel:
        return OpenChannel(self)

    def close(self) -> None:
        super().close()
        if self._watch is not None:
            self._watch.cancel()

    def on_closed(self, channel: Channel) -> None:
        assert isinstance(channel, OpenChannel)
        self._blamed |= channel.quarantine
        super().on_closed(channel)

    def on_reply(self, channel: Channel, sent: SentBatch, frame: wire.Frame) -> None:
        if self._deaths:
            del self._deaths[sent.jobs[0]]  # A Counter accepts missing keys here.
        super().on_reply(channel, sent, frame)

    def retry_lost(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        unanswered = self._count_death(
            [job for position, job in enumerate(lost.jobs) if position not in streaming]
        )
        blamed = [job for job in unanswered if job in self._blamed]
        innocent = [job for job in unanswered if job not in self._blamed] if blamed else []
        self._blamed.difference_update(lost.jobs)
        if not self.accepting:
            self.refuse_all(lost.jobs, error)
            return
        groups = blame(unanswered, blamed, len(lost.jobs))
        again = {*innocent, *(job for group in groups for job in group.jobs)}
        self.refuse_all([job for job in lost.jobs if job not in again], error)
        self.queue.put_back(innocent)
        self.queue.suspect(groups)
        self._flush()

    def requeue(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        unanswered = self._count_death(
            [job for position, job in enumerate(lost.jobs) if position not in streaming]
        )
        self._blamed.difference_update(lost.jobs)
        if not self.accepting:
            unanswered = []
        again = set(unanswered)
        self.refuse_all([job for job in lost.jobs if job not in again], error)
        self.queue.put_back(unanswered)
        self._flush()

    def _count_death(self, jobs: list[Job]) -> list[Job]:
        """Count a death for each job, and return the jobs that may be tried again."""
        self._deaths.update(jobs)
        self._begun.update(self._due.keys() & jobs)
        return [job for job in jobs if self._deaths[job] < MAX_DEATHS]

    def _refuse(self, job: Job, error: TsxError) -> None:
        del self._deaths[job]
        self._blamed.discard(job)
        super()._refuse(job, error)

    def _refuse_running(self, job: Job) -> None:
        del self._deaths[job]
        self._blamed.discard(job)
        super()._refuse_running(job)

    def room(self) -> int:
        return (
            sum(self.limits.max_items - channel.batches for channel in self.channels) - self.pending
        )

    def change(self, limits: BatchLimits, bounds: Bounds) -> None:
        super().change(limits, bounds)
        if self._watch is not None:  # `response_timeout` may have changed.
            self._watch.cancel()
            self._refuse_overdue()

    def _decide(self, now: float) -> Assignment[Channel]:
        return join(self.queue, self.channels, now, self.limits)

    def _flush(self, at_least: float = 0.0) -> None:
        super()._flush(at_least)
        self._watch_answers()

    def _watch_answers(self) -> None:
        if self._watch is None and any(channel.batches for channel in self._all_channels):
            self._watch = self._loop.call_later(self.response_timeout, self._refuse_overdue)

    def _refuse_overdue(self) -> None:
        """Refuse requests whose answer or next piece is overdue, while the worker is alive.

        The supervisor kills a worker that sends nothing at all, after the same time.
        """
        self._watch = None
        before = time.monotonic() - self.response_timeout
        oldest: float | None = None
        for channel in list(self._all_channels):
            assert isinstance(channel, OpenChannel)
            # Nothing is read from the worker while a client is slow.
            if channel.began > before and not channel.held:
                for job in channel.overdue(before):
                    text = (
                        f"Worker did not answer within {self.response_timeout:g} s"
                        " (responseTimeout), so the request was cancelled."
                    )
                    self._refuse(job, WorkerDied(text))
            earliest = channel.earliest()
            oldest = earliest if oldest is None else min(oldest, earliest or oldest)
        if oldest is not None:
            self._watch = self._loop.call_later(max(oldest - before, 0.1), self._refuse_overdue)
        self._flush()
