"""A version's queue and its workers.

The dispatcher calls `assign` on arrivals and replies, and applies the assignment.
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
from tsx_runtime.core.scheduling.batching import (
    BLAMELESS,
    Assignment,
    assign,
    halves,
    split_unstarted,
)
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

# TorchServe's words, for which its clients look, even if the queue is full.
NO_WORKER = "has no worker to serve inference request. Please use scale workers API to add workers."


class Bounds(NamedTuple):
    """The limits of the queue; further requests are refused with `overload_status`."""

    items: int = 100
    size: int = 1 << 30  # bytes of bodies; one request alone may exceed it
    overload_status: int = 503
    slo: LatencyTarget | None = None  # a latency target, for the dispatcher that has one


class Dispatcher:
    """The queued and running jobs of one version; each is answered or refused exactly once.

    Jobs are accepted while a worker serves the version or is starting (`accept`), and the queue has
    room.
    """

    no_worker_message = NO_WORKER

    def __init__(
        self, label: str, limits: BatchLimits, bounds: Bounds, queue: RequestQueue | None = None
    ) -> None:
        self.label = label  # the name in errors: Model "m" [Version 1.0]
        self.limits = limits
        self.bounds = bounds
        self.queue = RequestQueue() if queue is None else queue
        self.channels: list[Channel] = []
        # All channels that may hold jobs, including those that get no more.
        self._all_channels: WeakSet[Channel] = WeakSet()
        self.stats = Stats(label, self)
        self.service_rate = ServiceRate()
        self.accepting = False
        self.no_worker_reason = ""
        self.seconds_until_ready: Callable[[], float | None] = lambda: None  # set by the supervisor
        # Loads an unloaded model; returns False if there is none.
        self.wake: Callable[[], bool] = lambda: False
        self.cold_starts = ColdStarts()
        self.response_timeout = 120.0  # seconds; enforced by the supervisor
        self._loop = asyncio.get_running_loop()
        self._flush_due = False
        # The only timer for actions without an arrival.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER
        # The deadlines of accepted jobs; NEVER for jobs whose answer may not be counted.
        self._due: dict[Job, float] = {}
        # Jobs of `_due` that wait again after their worker was lost.
        self._begun: set[Job] = set()
        # The message for a full queue: whether by requests or by bytes, text, seconds.
        self._full: tuple[bool, str, int] | None = None
        self._open = 0  # accepted jobs that are neither answered nor refused
        self._idle = asyncio.Event()
        self._idle.set()

    # The methods that routes call

    def submit(self, job: Job) -> None:
        queue, bounds = self.queue, self.bounds
        size = len(job.body)
        full = len(queue.jobs) >= bounds.items or queue.size + size > bounds.size
        if full:
            # A burst may fill the queue while workers idle, and left jobs hold a place until now.
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
            # One flush per turn of the loop: jobs that arrived together leave together.
            if not self._flush_due:
                self._flush_due = True
                self._loop.call_soon(self._flush)

    @property
    def pending(self) -> int:
        """The number of requests that wait for a worker."""
        return len(self.queue)

    @property
    def in_flight(self) -> int:
        return self._open

    def room(self) -> int:
        """Return how many more requests could be sent to a worker now."""
        return (
            self.limits.max_items * sum(channel.batches == 0 for channel in self.channels)
            - self.pending
        )

    def reject_busy(self, job: Job) -> None:
        """Refuse a request that must not wait (`useJobTicket`)."""
        busy = (
            " All workers are busy, and with useJobTicket nothing waits for one."
            if self.channels
            else ""
        )
        self._reject(job, NoWorker(f"{self._no_worker().message}.{busy}"))

    def reject_without_time(self, job: Job) -> None:
        """Refuse a request because `responseTimeout` is 0, in TorchServe's words.

        No worker is ended for it.
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
        """Note that a client has left.

        If its job waits, it is refused in this turn of the loop; else its answer is dropped.
        """
        self.queue.leave(job)
        for channel in self._all_channels:
            channel.cancel(job)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def change(self, limits: BatchLimits, bounds: Bounds) -> None:
        """Set new limits; requests that wait beyond a lower bound stay."""
        self.limits, self.bounds, self._full = limits, bounds, None
        self._flush()

    def continue_counts(self, stats: Stats) -> None:
        """Continue the counts of another dispatcher, which counts until its requests have ended."""
        self.stats = stats
        stats.add_serving(self)

    # The methods that the supervisor calls

    def new_channel(self) -> Channel:
        return Channel(self)

    def add(self, channel: Channel) -> None:
        if channel.closed.done():  # The worker has died since it was ready.
            return
        channel.began = time.monotonic()  # It is free for a batch from now on.
        self.cold_starts.end(channel.began)
        self.channels.append(channel)
        self._all_channels.add(channel)
        self._full = None
        self._flush()

    def remove(self, channel: Channel) -> None:
        """Send nothing more on a channel; its jobs are still answered."""
        if channel in self.channels:
            self.channels.remove(channel)

    async def release(self, channel: Channel) -> None:
        """Send nothing more to a process that has a successor; wait until it holds no job."""
        self.remove(channel)
        await channel.drained()

    def accept(self, accepting: bool, no_worker_reason: str = "") -> None:
        """Set whether a worker serves or will serve.

        Without one, waiting requests are refused, with the reason if it is known.
        """
        self.accepting = accepting
        self.no_worker_reason = no_worker_reason
        if not accepting:
            self.refuse_waiting(self._no_worker())

    def refuse_waiting(self, error: TsxError) -> None:
        self.refuse_all(self.queue.drop_all(), error)

    def refuse_all(self, jobs: Iterable[Job], error: TsxError) -> None:
        """Refuse accepted requests that no worker will answer."""
        for job in jobs:
            self._refuse(job, error)

    def retry_lost(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        """Try the jobs of a dead worker again, in smaller groups; refuse the rest.

        Jobs whose answer had begun are refused, and the job that is found to be the cause.
        """
        unanswered = self._refuse_streamed(lost, streaming, error)
        groups = (
            halves(Suspects(unanswered, lost.deaths))
            if len(unanswered) == len(lost.jobs)
            else [Suspects([job], lost.deaths + 1) for job in unanswered]
        )
        self._run_again(unanswered, groups, error)

    def requeue(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        """Run the jobs of a stuck worker again, unchanged; once only, as one may be the cause."""
        unanswered = self._refuse_streamed(lost, streaming, error)
        self._run_again(unanswered, [Suspects(unanswered, BLAMELESS)] if unanswered else [], error)

    def _refuse_streamed(
        self, lost: SentBatch, streaming: Collection[int], error: TsxError
    ) -> list[Job]:
        self.refuse_all(
            [job for position, job in enumerate(lost.jobs) if position in streaming], error
        )
        unanswered = [job for position, job in enumerate(lost.jobs) if position not in streaming]
        self._begun.update(self._due.keys() & unanswered)
        return unanswered

    def _run_again(self, unanswered: list[Job], groups: list[Suspects], error: TsxError) -> None:
        if groups and self.accepting:
            self.queue.suspect(groups)
            self._flush()
        else:
            self.refuse_all(unanswered, error)

    async def wait_idle(self) -> None:
        """Wait until no job is queued or running."""
        await self._idle.wait()

    async def wait_drained(self) -> None:
        """Wait until no job is queued or running and no sequence is open."""
        await self.wait_idle()

    def close(self) -> None:
        """Stop the timer, since no job comes any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, NEVER

    # The methods that channels call

    def on_reply(self, channel: Channel, sent: SentBatch, frame: wire.Frame) -> None:
        now = time.monotonic()
        self._flush()  # The next batch leaves before these answers are written.
        if self.cold_starts.until:
            frame = self.cold_starts.with_headers(sent.jobs, frame)
        _, jobs, at, _, free, arrivals = sent  # Unpacking is as cheap as one field.
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
        # The channel has checked the number of items.
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
        """Put unstarted jobs back in their old places.

        Started jobs stay in `channel.sent` for the supervisor.
        """
        self.remove(channel)
        while len(channel.sent) > 1:
            jobs = channel.sent.pop().jobs
            if channel.prefetch:
                self.queue.suspect(split_unstarted(jobs))
            else:
                self.queue.put_back(jobs)
        if not self.accepting:  # It was the last worker, on its way out.
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
        assignment = self._decide(now)
        for channel, jobs in assignment.batches:
            channel.send(jobs, now)
        for channel, group in assignment.retries:
            channel.send(group.jobs, now, group.deaths)
        for job in assignment.skipped:
            self._refuse(job, self._gone_or_late(job))
        if assignment.wake < self._timer_at:
            self._set_timer(assignment.wake, now)

    def _decide(self, now: float) -> Assignment[Channel]:
        return assign(self.queue, self.channels, now, self.limits, self.service_rate.short)

    def _set_timer(self, at: float, now: float) -> None:
        """Set the timer to an earlier time.

        An earlier timer stays: it costs one flush, and sets the next.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(at - now, self._on_timer)

    def _on_timer(self) -> None:
        at, self._timer, self._timer_at = self._timer_at, None, NEVER
        # Loops round to milliseconds, and a timer that is early would have to be set again.
        self._flush(at)
        if self._due:
            self._refuse_late(max(at, time.monotonic()))

    def _watch_deadline(self, job: Job, due: float) -> None:
        self._due[job] = due
        if due < self._timer_at:
            self._set_timer(due, time.monotonic())

    def _refuse_late(self, now: float) -> None:
        """Refuse jobs that run past their deadline, unless their answer has begun.

        The worker is told, and its answer is dropped.
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
        """Tell whether a worker holds a job whose answer has not begun."""
        return any(channel.holds(job) for channel in self._all_channels)

    def _refuse_running(self, job: Job) -> None:
        self._reject(job, self._late(begun=True))
        self._give_up(job)

    def _give_up(self, job: Job) -> None:
        """Drop the future answer of a job, which counts as open until its worker is done."""
        self._begun.discard(job)
        self._due[job] = NEVER
        job.give_up()
        for channel in self._all_channels:
            channel.cancel(job)

    def _reject(self, job: Job, error: TsxError) -> None:
        """Refuse a job that was never accepted."""
        self.stats.add_refusal(job, error, time.monotonic())
        job.refuse(error)

    def _no_worker(self) -> NoWorker:
        return NoWorker(f"{self._no_worker_text()}{self.no_worker_reason}")

    def _no_worker_text(self) -> str:
        model, _, version = self.label.partition(" [Version ")
        return f"{model} {self.no_worker_message}" + (
            f" (version {version.rstrip(']')})" if version else ""
        )

    def _displace_for(self, job: Job) -> bool:
        """Refuse the least urgent request of a full queue for one of a greater priority."""
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
        """Return the error for a full queue.

        Its text is made once per reply while workers serve, as overload leaves no time for more.
        """
        by_items = len(self.queue.jobs) >= self.bounds.items
        if self._full is None or self._full[0] != by_items or not self.channels:
            self._full = self._full_message(by_items)
        _, text, seconds = self._full
        return QueueFull(text, retry_after=seconds, status=self.bounds.overload_status)

    def _full_message(self, by_items: bool) -> tuple[bool, str, int]:
        queue, seconds = self.queue, self._seconds_to_empty()
        cause = (
            f"{len(queue.jobs)} requests wait (jobQueueSize)"
            if by_items
            else f"requests with {queue.size} bytes wait (maxQueueBytes)"
        )
        return (
            by_items,
            f"{self._no_worker_text()}. The queue is full: {cause}; try again in {seconds} s.",
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
        """Estimate the seconds until serving or starting workers have done the waiting requests."""
        later = 0.0 if self.channels else self.seconds_until_ready() or 0.0
        return retry_after(
            len(self.queue), self.service_rate.rate * (len(self.channels) or 1), later
        )

    def _refuse(self, job: Job, error: TsxError) -> None:
        self._due.pop(job, None)
        self._begun.discard(job)
        if not job.late:  # False: it is refused already
            self._reject(job, error)
        self._close(1)

    def _close(self, jobs: int) -> None:
        self._open -= jobs
        self.stats.ended += jobs
        if not self._open:
            self._idle.set()
