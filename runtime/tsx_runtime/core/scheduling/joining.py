"""Dispatch to workers in which requests join running ones.

These workers use continuous batching or an asynchronous handler. `join` makes the decisions of
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
from tsx_runtime.core.scheduling.multiplexed_channel import MultiplexedChannel
from tsx_runtime.core.scheduling.queue import BatchLimits, RequestQueue, Suspects
from tsx_runtime.errors import TsxError, WorkerDied

# The first worker that dies with a request, two more to find the cause, and one by accident.
MAX_DEATHS = 4


def join(
    queue: RequestQueue, workers: Sequence[SlotT], now: float, limits: BatchLimits
) -> Assignment[SlotT]:
    """Take the requests to send now out of `queue`; it has no other effect.

    The `batches` of a slot are the running requests of its worker, at most `limits.max_items`.

    1. Suspects go first. A group goes to a worker without requests in quarantine, to the one with
       the fewest running requests. Other requests join it only after the quarantine. While the
       group waits for room, this worker takes nothing else.
    2. Each other request goes to the worker with the fewest running requests, if it has room, in
       the queue's order. No request waits for a batch to be filled.
    """
    skipped = (
        queue.drop_expired(now) if queue.some_clients_left or queue.earliest_deadline <= now else []
    )
    load = {
        index: worker.batches for index, worker in enumerate(workers) if not worker.has_suspects
    }
    retries: list[tuple[SlotT, Suspects]] = []
    while queue.suspects and load:
        index = min(load, key=lambda index: load[index])
        running_count = load.pop(index)
        if running_count and running_count + len(queue.suspects[0].jobs) > limits.max_items:
            break
        retries.append((workers[index], queue.take_suspects()))
    jobs_by_worker: dict[int, list[Job]] = {}
    single_request = BatchLimits(1, limits.max_bytes)
    while queue.jobs and load:
        index = min(load, key=lambda index: load[index])
        if load[index] >= limits.max_items:
            break
        jobs_by_worker.setdefault(index, []).extend(queue.take(single_request))
        load[index] += 1
    batches = [(workers[index], jobs) for index, jobs in jobs_by_worker.items()]
    return Assignment(batches, retries, skipped, queue.earliest_deadline)


def blame(unanswered: list[Job], quarantined: list[Job], lost_count: int) -> list[Suspects]:
    """Return the groups to try after a worker died with `lost_count` requests.

    Args:
        unanswered: The lost requests whose answer had not begun.
        quarantined: Those of them that were in quarantine. They are the suspects, each on its own;
            a single one is the cause. If there are none, all are suspects, in halves.
        lost_count: The number of requests; if it was only one, that request is the cause.
    """
    if quarantined:
        return halves(Suspects(quarantined, 1))
    if len(unanswered) == 1:
        return [Suspects(unanswered, 1)] if lost_count > 1 else []
    return halves(Suspects(unanswered, 0)) if unanswered else []


class JoiningDispatcher(Dispatcher):
    """The dispatcher of a version whose workers let requests join running ones.

    `response_timeout` applies to each request, and starts again with each piece of its answer.

    Requests of a worker that died are tried again unless their answer had begun. They are tried in
    halves, then each alone, and are first in quarantine. If another worker dies during it, they are
    blamed. A request that kills a worker later makes others suspects, too. No request is tried more
    than `MAX_DEATHS` times.
    """

    def __init__(self, label: str, limits: BatchLimits, bounds: Bounds) -> None:
        super().__init__(label, limits, bounds)
        # The timer that checks for overdue answers.
        self._overdue_timer: asyncio.TimerHandle | None = None
        self._deaths: Counter[Job] = Counter()  # number of workers that died, by request
        self._quarantined: set[Job] = set()  # requests that were in quarantine when a worker died

    def new_channel(self) -> Channel:
        return MultiplexedChannel(self)

    def close(self) -> None:
        super().close()
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()

    def on_closed(self, channel: Channel) -> None:
        assert isinstance(channel, MultiplexedChannel)
        self._quarantined |= channel.quarantine
        super().on_closed(channel)

    def on_reply(self, channel: Channel, sent: SentBatch, frame: wire.Frame) -> None:
        if self._deaths:
            del self._deaths[sent.jobs[0]]  # A Counter has no error for a missing key.
        super().on_reply(channel, sent, frame)

    def retry_lost(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        unanswered = self._count_death(lost, streaming)
        quarantined = [job for job in unanswered if job in self._quarantined]
        other_jobs = (
            [job for job in unanswered if job not in self._quarantined] if quarantined else []
        )
        self._quarantined.difference_update(lost.jobs)
        if not self.accepting:
            self.refuse_all(lost.jobs, error)
            return
        groups = blame(unanswered, quarantined, len(lost.jobs))
        retried = {*other_jobs, *(job for group in groups for job in group.jobs)}
        self.refuse_all([job for job in lost.jobs if job not in retried], error)
        self.queue.put_back(other_jobs)
        self.queue.suspect(groups)
        self._flush()

    def requeue(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        unanswered = self._count_death(lost, streaming)
        self._quarantined.difference_update(lost.jobs)
        if not self.accepting:
            unanswered = []
        retried = set(unanswered)
        self.refuse_all([job for job in lost.jobs if job not in retried], error)
        self.queue.put_back(unanswered)
        self._flush()

    def _count_death(self, lost: SentBatch, streaming: Collection[int]) -> list[Job]:
        """Count a death for each unanswered job, and return the jobs that may be tried again."""
        jobs = [job for position, job in enumerate(lost.jobs) if position not in streaming]
        self._deaths.update(jobs)
        self._restarted.update(self._deadlines.keys() & jobs)
        return [job for job in jobs if self._deaths[job] < MAX_DEATHS]

    def _refuse(self, job: Job, error: TsxError) -> None:
        del self._deaths[job]
        self._quarantined.discard(job)
        super()._refuse(job, error)

    def _refuse_running(self, job: Job) -> None:
        del self._deaths[job]
        self._quarantined.discard(job)
        super()._refuse_running(job)

    def room(self) -> int:
        return (
            sum(self.limits.max_items - channel.batches for channel in self.channels) - self.pending
        )

    def change(self, limits: BatchLimits, bounds: Bounds) -> None:
        super().change(limits, bounds)
        if self._overdue_timer is not None:  # `response_timeout` may have changed.
            self._overdue_timer.cancel()
            self._refuse_overdue()

    def _decide(self, now: float) -> Assignment[Channel]:
        return join(self.queue, self.channels, now, self.limits)

    def _flush(self, min_now: float = 0.0) -> None:
        super()._flush(min_now)
        self._watch_answers()

    def _watch_answers(self) -> None:
        if self._overdue_timer is None and any(channel.batches for channel in self._all_channels):
            self._overdue_timer = self._loop.call_later(self.response_timeout, self._refuse_overdue)

    def _refuse_overdue(self) -> None:
        """Refuse requests whose answer or next piece is overdue, although the worker is alive.

        After the same time, the supervisor kills a worker that sends nothing at all.
        """
        self._overdue_timer = None
        overdue_since = time.monotonic() - self.response_timeout
        oldest: float | None = None
        for channel in list(self._all_channels):
            assert isinstance(channel, MultiplexedChannel)
            # Nothing is read from the worker while a client is slow.
            if channel.began > overdue_since and not channel.is_paused:
                for job in channel.pop_overdue(overdue_since):
                    text = (
                        f"Worker did not answer within {self.response_timeout:g} s"
                        " (responseTimeout), so the request was cancelled."
                    )
                    self._refuse(job, WorkerDied(text))
            channel_oldest = channel.oldest_activity()
            oldest = channel_oldest if oldest is None else min(oldest, channel_oldest or oldest)
        if oldest is not None:
            self._overdue_timer = self._loop.call_later(
                max(oldest - overdue_since, 0.1), self._refuse_overdue
            )
        self._flush()
