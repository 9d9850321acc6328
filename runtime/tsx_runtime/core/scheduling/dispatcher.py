"""A version's queue and its workers: calls `assign` on arrivals and replies, and applies the
assignment.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple
from weakref import WeakSet

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime import wire
from tsx_runtime.core.scheduling.batching import BLAMELESS, Assignment, apart, assign, halves
from tsx_runtime.core.scheduling.channel import Channel, SentBatch, without_late
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue, Suspects
from tsx_runtime.core.scheduling.service_rate import ServiceRate, latest_start, retry_after
from tsx_runtime.core.telemetry.batch_times import times_in
from tsx_runtime.core.telemetry.cold_starts import ColdStarts
from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.errors import (
    AnswerLate,
    ClientLeft,
    DeadlinePassed,
    NoWorker,
    QueueFull,
    TsxError,
    WorkerDied,
)

TIMES_SIZE = wire.TIMES.size

# TorchServe's words, which its clients look for, also where the queue is full
NO_WORKER = "has no worker to serve inference request. Please use scale workers API to add workers."


class Bounds(NamedTuple):
    """The limits of the queue; further requests are refused with `overload_status`."""

    items: int = 100
    size: int = 1 << 30  # bytes of bodies; one request alone may exceed it
    overload_status: int = 503
    slo: LatencyTarget | None = None  # of a version whose dispatcher has one


class Dispatcher:
    """Holds the queued and the running jobs of one version; every job it accepts is answered or
    refused exactly once.

    Jobs are accepted while a worker serves the version or is on its way (`accept`), and the queue
    has room.
    """

    no_worker_words = NO_WORKER

    def __init__(
        self, label: str, limits: BatchLimits, bounds: Bounds, queue: RequestQueue | None = None
    ) -> None:
        self.label = label  # as errors name it: Model "m" [Version 1.0]
        self.limits = limits
        self.bounds = bounds
        self.queue = RequestQueue() if queue is None else queue
        self.channels: list[Channel] = []
        self._all_channels: WeakSet[Channel] = (
            WeakSet()
        )  # also those that get nothing more, and may hold something
        self.stats = Stats(label, self)
        self.service_rate = ServiceRate()
        self.accepting = False
        self.why_not = ""
        self.seconds_until_ready: Callable[[], float | None] = lambda: None  # the supervisor knows
        self.wake: Callable[[], bool] = lambda: (
            False
        )  # have an unloaded model loaded; False where there is none
        self.cold_starts = ColdStarts()
        self.response_timeout = 120.0  # seconds; the supervisor holds workers to it
        self._loop = asyncio.get_running_loop()
        self._flush_due = False
        self._timer: asyncio.TimerHandle | None = (
            None  # the one for whatever is to be done next although nothing arrives
        )
        self._timer_at = NEVER
        # the deadlines of accepted jobs that have one; NEVER of those that may not be counted
        self._due: dict[Job, float] = {}
        self._begun: set[Job] = (
            set()
        )  # of those: what waits again after it had begun at a worker that was lost
        self._full: tuple[bool, str, int] | None = (
            None  # what is said when the queue is full, by requests or by bytes
        )
        self._open = 0  # accepted and neither answered nor refused yet
        self._idle = asyncio.Event()
        self._idle.set()

    # What routes call

    def submit(self, job: Job) -> None:
        queue, bounds = self.queue, self.bounds
        size = len(job.body)
        full = len(queue.jobs) >= bounds.items or queue.size + size > bounds.size
        if full:
            # a burst may fill the queue while workers idle, and jobs whose clients have left hold a
            # place until now
            if self._flush_due:
                self._flush()
            full = len(queue.jobs) >= bounds.items or (
                queue.size > 0 and queue.size + size > bounds.size
            )
        if not self.accepting and not self.wake():
            self._reject(job, self._no_worker())
        elif full and not self._displace_for(job):
            self._reject(job, self._queue_full())
        else:
            if not self._open:
                self._idle.clear()
            self._open += 1
            if job.deadline is not None:
                self._watch_deadline(job, job.deadline)
                start = latest_start(job.arrived, job.deadline, self.service_rate.answer_time)
                job.deadline = min(start, job.arrived + job.patience)
            queue.put(job, size)
            if (
                not self._flush_due
            ):  # one flush a turn of the loop: what arrived together leaves together
                self._flush_due = True
                self._loop.call_soon(self._flush)

    @property
    def pending(self) -> int:
        """Requests that wait for a worker."""
        return len(self.queue)

    @property
    def in_flight(self) -> int:
        return self._open

    def room(self) -> int:
        """How many more requests could leave for a worker now."""
        return (
            self.limits.max_items * sum(channel.batches == 0 for channel in self.channels)
            - self.pending
        )

    def reject_busy(self, job: Job) -> None:
        """Where nothing may wait (`useJobTicket`)."""
        busy = (
            " All workers are busy, and with useJobTicket nothing waits for one."
            if self.channels
            else ""
        )
        self._reject(job, NoWorker(f"{self._no_worker().message}.{busy}"))

    def reject_without_time(self, job: Job) -> None:
        """Where `responseTimeout` is 0: TorchServe's words, without the end of a worker for each
        request.
        """
        self._reject(
            job,
            WorkerDied(
                "Worker died. Cause: it did not answer within 0 s (responseTimeout). Set a longer"
                " time."
            ),
        )

    @property
    def unused(self) -> bool:
        """Whether nothing would be lost without workers."""
        return not self._open

    def leave(self, job: Job) -> None:
        """Its client is gone.

        If it waits, it gives its place up in this turn of the loop and is refused; else its answer
        goes nowhere.
        """
        self.queue.leave(job)
        for channel in self._all_channels:
            channel.cancel(job)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def change(self, limits: BatchLimits, bounds: Bounds) -> None:
        """From now on. What waits beyond a lower bound stays."""
        self.limits, self.bounds, self._full = limits, bounds, None
        self._flush()

    def continue_counts(self, stats: Stats) -> None:
        """Count on where another dispatcher has begun, and goes on while it has requests."""
        self.stats = stats
        stats.counts_for(self)

    # What the supervisor calls

    def new_channel(self) -> Channel:
        return Channel(self)

    def add(self, channel: Channel) -> None:
        if channel.closed.done():  # its worker has died since it was ready
            return
        channel.began = time.monotonic()  # from now on it is free for a batch
        self.cold_starts.end(channel.began)
        self.channels.append(channel)
        self._all_channels.add(channel)
        self._full = None
        self._flush()

    def remove(self, channel: Channel) -> None:
        """Send it nothing more; what it holds it still answers."""
        if channel in self.channels:
            self.channels.remove(channel)

    async def release(self, channel: Channel) -> None:
        """Another process serves in its place: send it nothing more, and wait until it holds
        nothing.
        """
        self.remove(channel)
        await channel.drained()

    def accept(self, accepting: bool, why_not: str = "") -> None:
        """Whether there is a worker that serves, or will.

        When there is none, what waits is refused, with the reason if it is known.
        """
        self.accepting = accepting
        self.why_not = why_not
        if not accepting:
            self.refuse_waiting(self._no_worker())

    def refuse_waiting(self, error: TsxError) -> None:
        self.refuse_all(self.queue.drop_all(), error)

    def refuse_all(self, jobs: Iterable[Job], error: TsxError) -> None:
        """Answer accepted requests that no worker will."""
        for job in jobs:
            self._refuse(job, error)

    def retry_lost(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        """Try what a worker had begun when it died again, in smaller groups; refuse what cannot be,
        and what is found guilty.
        """
        left = self._left_of(lost, streaming, error)
        groups = (
            halves(Suspects(left, lost.deaths))
            if len(left) == len(lost.jobs)
            else [Suspects([job], lost.deaths + 1) for job in left]
        )
        self._run_again(left, groups, error)

    def requeue(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        """Run again, as it is, what a worker had begun that was stuck through no fault of its
        requests; once: one may have stopped it.
        """
        left = self._left_of(lost, streaming, error)
        self._run_again(left, [Suspects(left, BLAMELESS)] if left else [], error)

    def _left_of(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> list[Job]:
        self.refuse_all(
            [job for position, job in enumerate(lost.jobs) if position in streaming], error
        )
        left = [job for position, job in enumerate(lost.jobs) if position not in streaming]
        self._begun.update(self._due.keys() & left)
        return left

    def _run_again(self, left: list[Job], groups: list[Suspects], error: TsxError) -> None:
        if groups and self.accepting:
            self.queue.suspect(groups)
            self._flush()
        else:
            self.refuse_all(left, error)

    async def wait_idle(self) -> None:
        """Wait until no job is queued or running."""
        await self._idle.wait()

    async def wait_drained(self) -> None:
        """Wait until no job is queued or running and no sequence is open."""
        await self.wait_idle()

    def close(self) -> None:
        """Nothing comes any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, NEVER

    # What channels call

    def on_reply(self, channel: Channel, sent: SentBatch, frame: wire.Frame) -> None:
        now = time.monotonic()
        self._flush()  # the next batch leaves before this one's answers are written
        if self.cold_starts.until:
            frame = self.cold_starts.with_headers(sent.jobs, frame)
        _, jobs, at, _, free, arrivals = sent  # by name, each field costs as much as all of them
        _, _, codes, items, extra = frame
        size = len(jobs)
        self.service_rate.add(size, now - max(at, channel.replied), now - at)
        channel.replied = now
        if self._due:
            for job in jobs:
                self._due.pop(job, None)
            self._begun.difference_update(jobs)
            jobs, arrivals, codes, items = without_late(sent, frame)
            self._close(size - len(jobs))
            size = len(jobs)
        times = extra if type(extra) is bytes and len(extra) == TIMES_SIZE else times_in(extra)
        batch = (free, at, now, size, times, arrivals, None if codes.count(200) == size else codes)
        self._full = None
        # The channel has counted the items.
        for job, (status, headers, body) in zip(jobs, items, strict=False):
            job.answer(status, headers, body, batch)
        if size:
            # The answers are on their way, so no client waits for the counting.
            self.stats.add_batch(batch, jobs)
        else:
            self.stats.add_late_batch(batch)
        self._close(size)
        if len(extra) > TIMES_SIZE:
            values = json.loads(bytes(extra[TIMES_SIZE:]))
            self.stats.add_handler_metrics(values, sent.jobs)
            self.queue.learn(sent.jobs, values)

    def on_begun(self, job: Job, headers: wire.Buffer) -> wire.Buffer:
        return self.cold_starts.with_header(job, headers)

    def on_proven(self) -> None:
        self._flush()

    def on_report(self, channel: Channel, facts: dict[str, Any]) -> None:
        self.stats.add_report(channel.worker, facts)

    def on_closed(self, channel: Channel) -> None:
        """What it had not begun goes back to its old place; what it had begun stays in
        `channel.sent` for the supervisor.
        """
        self.remove(channel)
        while len(channel.sent) > 1:
            jobs = channel.sent.pop().jobs
            if channel.prefetch:
                self.queue.suspect(apart(jobs))
            else:
                self.queue.put_back(jobs)
        if not self.accepting:  # it was the last, on its way out
            self.refuse_waiting(self._no_worker())
        else:
            self._flush()

    def _flush(self, at_least: float = 0.0) -> None:
        self._flush_due = False
        queue = self.queue
        if not queue.jobs and not queue.suspects:
            return
        now = time.monotonic()
        if now < at_least:
            now = at_least
        todo = self._decide(now)
        for channel, jobs in todo.batches:
            channel.send(jobs, now)
        for channel, group in todo.retries:
            channel.send(group.jobs, now, group.deaths)
        for job in todo.skipped:
            self._refuse(job, self._gone_or_late(job))
        if todo.wake < self._timer_at:
            self._set_timer(todo.wake, now)

    def _decide(self, now: float) -> Assignment[Channel]:
        return assign(self.queue, self.channels, now, self.limits, self.service_rate.short)

    def _set_timer(self, at: float, now: float) -> None:
        """One that is set already and goes off earlier stays: it costs one flush, and sets the
        next.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(at - now, self._on_timer)

    def _on_timer(self) -> None:
        at, self._timer, self._timer_at = self._timer_at, None, NEVER
        self._flush(
            at
        )  # loops round to milliseconds, and one that is early would have to be set again
        if self._due:
            self._refuse_late(max(at, time.monotonic()))

    def _watch_deadline(self, job: Job, due: float) -> None:
        self._due[job] = due
        if due < self._timer_at:
            self._set_timer(due, time.monotonic())

    def _refuse_late(self, now: float) -> None:
        """Refuse what still runs at its deadline, unless its answer has begun: the worker is told,
        and what it answers goes nowhere.
        """
        for job in [job for job, due in self._due.items() if due <= now]:
            if job.late:  # given up with another part of its request
                continue
            self._due.pop(job, None)
            if not job.gone and self._runs(job):
                self._refuse_running(job)
        if (earliest := min(self._due.values(), default=NEVER)) < self._timer_at:
            self._set_timer(earliest, now)

    def _runs(self, job: Job) -> bool:
        """Whether a worker holds it, and its answer has not begun."""
        return any(channel.holds(job) for channel in self._all_channels)

    def _refuse_running(self, job: Job) -> None:
        self._reject(job, self._late(begun=True))
        self._give_up(job)

    def _give_up(self, job: Job) -> None:
        """What its worker answers goes nowhere; it is counted as open until that is done."""
        self._begun.discard(job)
        self._due[job] = NEVER
        job.give_up()
        for channel in self._all_channels:
            channel.cancel(job)

    def _reject(self, job: Job, error: TsxError) -> None:
        """Refuse what was never accepted."""
        self.stats.add_refusal(job, error, time.monotonic())
        job.refuse(error)

    def _no_worker(self) -> NoWorker:
        return NoWorker(f"{self._no_worker_text()}{self.why_not}")

    def _no_worker_text(self) -> str:
        model, _, version = self.label.partition(" [Version ")
        return f"{model} {self.no_worker_words}" + (
            f" (version {version.rstrip(']')})" if version else ""
        )

    def _displace_for(self, job: Job) -> bool:
        """Where the queue is full, the least urgent request gives way to one of a greater
        priority.
        """
        queue, bounds = self.queue, self.bounds
        if not queue.jobs or queue.jobs[-1].priority >= job.priority:
            return False
        last = queue.jobs[-1]
        if (
            len(queue.jobs) > bounds.items
            or queue.size - len(last.body) + len(job.body) > bounds.size
        ):
            return False
        error = self._queue_full()
        self._refuse(queue.drop_last(), error)
        return True

    def _queue_full(self) -> QueueFull:
        """Overload is no time to word the same text again and again: while workers serve, it is
        kept until the next reply.
        """
        by_items = len(self.queue.jobs) >= self.bounds.items
        if self._full is None or self._full[0] != by_items or not self.channels:
            self._full = self._word_full(by_items)
        _, text, seconds = self._full
        return QueueFull(text, retry_after=seconds, status=self.bounds.overload_status)

    def _word_full(self, by_items: bool) -> tuple[bool, str, int]:
        queue, seconds = self.queue, self._seconds_to_empty()
        why = (
            f"{len(queue.jobs)} requests wait (jobQueueSize)"
            if by_items
            else f"requests with {queue.size} bytes wait (maxQueueBytes)"
        )
        return (
            by_items,
            f"{self._no_worker_text()}. The queue is full: {why}; try again in {seconds} s.",
            seconds,
        )

    def _gone_or_late(self, job: Job) -> TsxError:
        if job.gone:
            return ClientLeft(
                f"{self.label} did not start the request before its client disconnected."
            )
        return self._late(begun=job in self._begun)

    def _late(self, *, begun: bool) -> DeadlinePassed:
        seconds = self._seconds_to_empty()
        text = (
            f"{self.label} did not {'answer' if begun else 'start'} the request before its"
            f" deadline; try again in {seconds} s."
        )
        return (AnswerLate if begun else DeadlinePassed)(text, retry_after=seconds)

    def _seconds_to_empty(self) -> int:
        """What waits is done, by all workers that serve; where none does, by the first that
        will.
        """
        later = 0.0 if self.channels else self.seconds_until_ready() or 0.0
        return retry_after(
            len(self.queue), self.service_rate.rate * (len(self.channels) or 1), later
        )

    def _refuse(self, job: Job, error: TsxError) -> None:
        self._due.pop(job, None)
        self._begun.discard(job)
        if not job.late:  # it is refused already
            self._reject(job, error)
        self._close(1)

    def _close(self, jobs: int) -> None:
        self._open -= jobs
        self.stats.ended += jobs
        if not self._open:
            self._idle.set()
