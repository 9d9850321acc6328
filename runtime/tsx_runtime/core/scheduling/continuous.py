"""Dispatches to workers that accept requests while they work on others: continuous batching and
asynchronous handlers.

`join` is to `JoiningDispatcher` what `assign` is to `Dispatcher`: the whole decision, without I/O
and without a clock.
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

# of workers with one request: the first, those that find the guilty, and one that was not its fault
MOST_DEATHS = 4


def join(
    queue: RequestQueue, workers: Sequence[SlotT], now: float, limits: BatchLimits
) -> Assignment[SlotT]:
    """Take from `queue` what is to be done now; its only effect is that what it returns has left
    the queue.

    A slot's `batches` are the requests that its worker has under way; it takes `limits.max_items`
    of them at most.

    1. Suspects first, a group at a time: it goes to the worker with the fewest under way that has
       none in quarantine. No request joins them there until they have left it. While a group waits
       for room, the worker with the fewest takes nothing else.
    2. Each request goes to the worker with the fewest under way that has room, in the queue's
       order. Nothing waits to fill a batch.
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
    one = BatchLimits(1, limits.max_bytes)
    while queue.jobs and load:
        index = min(load, key=lambda index: load[index])
        if load[index] >= limits.max_items:
            break
        taken.setdefault(index, []).extend(queue.take(one))
        load[index] += 1
    batches = [(workers[index], jobs) for index, jobs in taken.items()]
    return Assignment(batches, retries, skipped, queue.earliest)


def blame(left: list[Job], blamed: list[Job], lost: int) -> list[Suspects]:
    """The groups to try when a worker has died with so many `lost` requests, of which `left` have
    not begun to be answered.

    Those that were in quarantine are to blame, each apart; one that was alone in it is found. Where
    none was, all are suspects, in halves; a request that was the worker's only one is found.
    """
    if blamed:
        return halves(Suspects(blamed, 1))
    if len(left) == 1:
        return [Suspects(left, 1)] if lost > 1 else []
    return halves(Suspects(left, 0)) if left else []


class JoiningDispatcher(Dispatcher):
    """Requests join what a worker has under way as soon as there is room; each has
    `response_timeout` to itself, counted again from each piece of its answer.

    What a worker had under way when it died is tried again unless its answer had begun: in halves
    and then alone, but only for as long as the quarantine lasts. Those that are in it when another
    worker dies did it. One that kills later takes others with it; no request is tried more often
    than `MOST_DEATHS` times.
    """

    def __init__(self, label: str, limits: BatchLimits, bounds: Bounds) -> None:
        super().__init__(label, limits, bounds)
        self._watch: asyncio.TimerHandle | None = None  # for answers that are overdue
        self._deaths: Counter[Job] = Counter()  # workers that have died with a request
        self._blamed: set[Job] = set()  # they were in quarantine when a worker died

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
            del self._deaths[sent.jobs[0]]  # a Counter takes that also for what it does not have
        super().on_reply(channel, sent, frame)

    def retry_lost(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        left = self._count_death(
            [job for position, job in enumerate(lost.jobs) if position not in streaming]
        )
        blamed = [job for job in left if job in self._blamed]
        innocent = [job for job in left if job not in self._blamed] if blamed else []
        self._blamed.difference_update(lost.jobs)
        if not self.accepting:
            self.refuse_all(lost.jobs, error)
            return
        groups = blame(left, blamed, len(lost.jobs))
        again = {*innocent, *(job for group in groups for job in group.jobs)}
        self.refuse_all([job for job in lost.jobs if job not in again], error)
        self.queue.put_back(innocent)
        self.queue.suspect(groups)
        self._flush()

    def requeue(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        left = self._count_death(
            [job for position, job in enumerate(lost.jobs) if position not in streaming]
        )
        self._blamed.difference_update(lost.jobs)
        if not self.accepting:
            left = []
        again = set(left)
        self.refuse_all([job for job in lost.jobs if job not in again], error)
        self.queue.put_back(left)
        self._flush()

    def _count_death(self, jobs: list[Job]) -> list[Job]:
        """Those that may be tried once more."""
        self._deaths.update(jobs)
        self._begun.update(self._due.keys() & jobs)
        return [job for job in jobs if self._deaths[job] < MOST_DEATHS]

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
        if self._watch is not None:  # `response_timeout` may be another
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
        """Refuse whose answer, or next piece, has not come in time, though the worker lives.

        A worker of which nothing at all is heard is killed by its supervisor, at the same age.
        """
        self._watch = None
        before = time.monotonic() - self.response_timeout
        oldest: float | None = None
        for channel in list(self._all_channels):
            assert isinstance(channel, OpenChannel)
            if (
                channel.began > before and not channel.held
            ):  # nothing is read from it while a client is slow
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
