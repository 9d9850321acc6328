"""The dispatcher: a version's queue and its workers.

It calls `assign` after arrivals and replies, and applies the assignment.
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
from tsx_runtime.core.scheduling.channel import Channel, SentBatch, without_refused
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue, Suspects
from tsx_runtime.core.scheduling.service_rate import (
    LatencyCapacity,
    ServiceRate,
    latest_start,
    retry_after,
)
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

# TorchServe's wording, which its clients check. It is used for a full queue as well.
NO_WORKER = "has no worker to serve inference request. Please use scale workers API to add workers."


class Bounds(NamedTuple):
    """The limits of the queue; requests beyond them are refused with `overload_status`."""

    items: int = 100
    size: int = 1 << 30  # bytes of bodies; one request alone may exceed it
    overload_status: int = 503
    slo: LatencyTarget | None = None  # With it, the server decides the other limits.


class Dispatcher:
    """The queued and running jobs of one version; each is answered or refused exactly once.

    Jobs are accepted if the queue has room, while a worker serves the version or is starting (see
    `accept`).
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
        # All channels that may have jobs, including channels that get no new ones.
        self._all_channels: WeakSet[Channel] = WeakSet()
        self.stats = Stats(label, self)
        self.service_rate = ServiceRate()
        self.accepting = False
        self.no_worker_reason = ""
        self.seconds_until_ready: Callable[[], float | None] = lambda: None  # set by the supervisor
        # Loads the model if it is unloaded; returns whether it did.
        self.wake: Callable[[], bool] = lambda: False
        self.cold_starts = ColdStarts()
        self.response_timeout = 120.0  # seconds; enforced by the supervisor
        self._loop = asyncio.get_running_loop()
        self._flush_due = False
        # The only timer. It starts actions that need no arrival or reply.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER
        # The deadlines of accepted jobs. NEVER marks jobs without a deadline whose answers are
        # perhaps left out of the counts.
        self._deadlines: dict[Job, float] = {}
        # Jobs of `_deadlines` that wait again after their worker was lost.
        self._restarted: set[Job] = set()
        # The error for a full queue: whether it is full by requests (not bytes), text, and seconds.
        self._full_error: tuple[bool, str, int] | None = None
        self._open_jobs = 0  # accepted jobs that are neither answered nor refused
        self._idle = asyncio.Event()
        self._idle.set()

    # The methods below are called by routes.

    def submit(self, job: Job) -> None:
        queue, bounds = self.queue, self.bounds
        size = len(job.body)
        is_full = len(queue.jobs) >= bounds.items or queue.size + size > bounds.size
        if is_full:
            # The queue may be full of jobs that could be sent now, or whose clients have left.
            if self._flush_due:
                self._flush()
            is_full = len(queue.jobs) >= bounds.items or (
                queue.size > 0 and queue.size + size > bounds.size
            )
        if not self.accepting and not self.wake():
            self._reject(job, self._no_worker())
        elif is_full and not self._make_room_for(job):
            self._reject(job, self._queue_full())
        else:
            if not self._open_jobs:
                self._idle.clear()
            self._open_jobs += 1
            if job.deadline is not None:
                self._watch_deadline(job, job.deadline)
                start = latest_start(job.arrived, job.deadline, self.service_rate.answer_time)
                job.deadline = min(start, job.arrived + job.patience)
            queue.put(job, size)
            # One flush per event-loop iteration lets jobs that arrive together share a batch.
            if not self._flush_due:
                self._flush_due = True
                self._loop.call_soon(self._flush)

    @property
    def pending(self) -> int:
        """The number of requests that wait for a worker."""
        return len(self.queue)

    @property
    def in_flight(self) -> int:
        return self._open_jobs

    def room(self) -> int:
        """Return how many more requests could be sent to a worker now."""
        return (
            self.limits.max_items * sum(channel.batches == 0 for channel in self.channels)
            - self.pending
        )

    def reject_busy(self, job: Job) -> None:
        """Refuse a request that must not wait (`useJobTicket`)."""
        explanation = (
            " All workers are busy, and with useJobTicket nothing waits for one."
            if self.channels
            else ""
        )
        self._reject(job, NoWorker(f"{self._no_worker().message}.{explanation}"))

    def reject_without_time(self, job: Job) -> None:
        """Refuse a request because `responseTimeout` is 0, in TorchServe's wording.

        The error says that a worker died, but none is ended.
        """
        self._reject(
            job,
            WorkerDied(
                "Worker died. Cause: it did not answer within 0 s (responseTimeout). Set a longer"
                " time."
            ),
        )

    @property
    def is_unused(self) -> bool:
        """Whether nothing would be lost if all workers ended."""
        return not self._open_jobs

    def leave(self, job: Job) -> None:
        """Note that a client has left.

        If its job waits, it is refused in this event-loop iteration. Otherwise its answer is
        dropped.
        """
        self.queue.leave(job)
        for channel in self._all_channels:
            channel.cancel(job)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def change(self, limits: BatchLimits, bounds: Bounds) -> None:
        """Set new limits; waiting requests stay, even beyond a lower limit."""
        self.limits, self.bounds, self._full_error = limits, bounds, None
        self._flush()

    def continue_counts(self, stats: Stats) -> None:
        """Continue another dispatcher's counts; both count until the other has no more requests."""
        self.stats = stats
        stats.add_serving(self)

    @property
    def current_limits(self) -> dict[str, int]:
        """The limits that change with the load, by the names of their parameters.

        They take the place of those in the plan.
        """
        return {}

    @property
    def latency_capacity(self) -> LatencyCapacity | None:
        """The capacity within a latency target; None without a target or a measurement."""
        return None

    def has_sequence_of(self, job: Job) -> bool:
        """Tell whether a request belongs to a sequence that runs here or was lost here."""
        return False

    def runs_sequence_of(self, job: Job) -> bool:
        """Tell whether a request belongs to a sequence that runs here."""
        return False

    def share_losses(self, old: Dispatcher) -> None:
        """Remember the sequences that another dispatcher loses, for the errors of clients."""

    # The methods below are called by the supervisor.

    def new_channel(self) -> Channel:
        return Channel(self)

    def add(self, channel: Channel) -> None:
        if channel.closed.done():  # The worker has died since it became ready.
            return
        channel.began = time.monotonic()  # It is free for a batch from now on.
        self.cold_starts.end(channel.began)
        self.channels.append(channel)
        self._all_channels.add(channel)
        self._full_error = None
        self._flush()

    def remove(self, channel: Channel) -> None:
        """Send nothing more on a channel; its jobs are still answered."""
        if channel in self.channels:
            self.channels.remove(channel)

    async def release(self, channel: Channel) -> None:
        """Send nothing more to a process that has a successor, and wait until it has no job."""
        self.remove(channel)
        await channel.drained()

    def accept(self, accepting: bool, no_worker_reason: str = "") -> None:
        """Set whether a worker serves or will serve.

        If not, waiting requests are refused, with the reason if it is known.
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

        A job is refused if its answer had begun, or if it is found to be the cause.
        """
        unanswered = self._refuse_streamed(lost, streaming, error)
        groups = (
            halves(Suspects(unanswered, lost.deaths))
            if len(unanswered) == len(lost.jobs)
            else [Suspects([job], lost.deaths + 1) for job in unanswered]
        )
        self._run_again(unanswered, groups, error)

    def requeue(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        """Run the jobs of a stuck worker again, unchanged, but only once: one may be the cause."""
        unanswered = self._refuse_streamed(lost, streaming, error)
        self._run_again(unanswered, [Suspects(unanswered, BLAMELESS)] if unanswered else [], error)

    def _refuse_streamed(
        self, lost: SentBatch, streaming: Collection[int], error: TsxError
    ) -> list[Job]:
        self.refuse_all(
            [job for position, job in enumerate(lost.jobs) if position in streaming], error
        )
        unanswered = [job for position, job in enumerate(lost.jobs) if position not in streaming]
        self._restarted.update(self._deadlines.keys() & unanswered)
        return unanswered

    def _run_again(self, unanswered: list[Job], groups: list[Suspects], error: TsxError) -> None:
        if groups and self.accepting:
            self.queue.suspect(groups)
            self._flush()
        else:
            self.refuse_all(unanswered, error)

    async def wait_idle(self) -> None:
        """Wait until every accepted job is answered."""
        await self._idle.wait()

    async def wait_drained(self) -> None:
        """Wait until every accepted job is answered, and no sequence is open."""
        await self.wait_idle()

    def close(self) -> None:
        """Stop the timer, since no more jobs will come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, NEVER

    # The methods below are called by channels.

    def on_reply(self, channel: Channel, sent: SentBatch, frame: wire.Frame) -> None:
        now = time.monotonic()
        self._flush()  # The next batch is sent before these answers are written.
        if self.cold_starts.until:
            frame = self.cold_starts.with_headers(sent.jobs, frame)
        # Unpacking all fields is as fast as reading one.
        _, jobs, sent_at, _, free_since, arrivals = sent
        _, _, codes, items, extra = frame
        size = len(jobs)
        self.service_rate.add(size, now - max(sent_at, channel.replied), now - sent_at)
        channel.replied = now
        if self._deadlines:
            for job in jobs:
                self._deadlines.pop(job, None)
            self._restarted.difference_update(jobs)
            jobs, arrivals, codes, items = without_refused(sent, frame)
            self._close(size - len(jobs))
            size = len(jobs)
        times = extra if type(extra) is bytes and len(extra) == TIMES_SIZE else times_in(extra)
        batch = (
            free_since,
            sent_at,
            now,
            size,
            times,
            arrivals,
            None if codes.count(200) == size else codes,
        )
        self._full_error = None
        # The channel has checked that there are as many items as jobs.
        for job, (status, headers, body) in zip(jobs, items, strict=False):
            job.answer(status, headers, body, batch)
        if size:
            # The answers are written already, so no client waits for the counting.
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
        """Put jobs that were not started back in their old places.

        Jobs that were started stay in `channel.sent` for the supervisor.
        """
        self.remove(channel)
        while len(channel.sent) > 1:
            jobs = channel.sent.pop().jobs
            if channel.prefetch:
                self.queue.suspect(split_unstarted(jobs))
            else:
                self.queue.put_back(jobs)
        if not self.accepting:  # It was the last worker, which had to end.
            self.refuse_waiting(self._no_worker())
        else:
            self._flush()

    def _flush(self, min_now: float = 0.0) -> None:
        self._flush_due = False
        queue = self.queue
        if not queue.jobs and not queue.suspects:
            return
        now = time.monotonic()
        if now < min_now:
            now = min_now
        assignment = self._decide(now)
        for channel, jobs in assignment.batches:
            channel.send(jobs, now)
        for channel, group in assignment.retries:
            channel.send(group.jobs, now, group.deaths)
        for job in assignment.skipped:
            self._refuse(job, self._skip_error(job))
        if assignment.wake_at < self._timer_at:
            self._set_timer(assignment.wake_at, now)

    def _decide(self, now: float) -> Assignment[Channel]:
        return assign(
            self.queue, self.channels, now, self.limits, self.service_rate.has_short_batches
        )

    def _set_timer(self, at: float, now: float) -> None:
        """Set the timer to an earlier time.

        A timer is never set to a later time: an early one costs one flush, which sets the next.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(at - now, self._on_timer)

    def _on_timer(self) -> None:
        at, self._timer, self._timer_at = self._timer_at, None, NEVER
        # Some event loops round to milliseconds. A timer that fires early counts as punctual;
        # otherwise it would have to be set again.
        self._flush(at)
        if self._deadlines:
            self._refuse_late(max(at, time.monotonic()))

    def _watch_deadline(self, job: Job, due: float) -> None:
        self._deadlines[job] = due
        if due < self._timer_at:
            self._set_timer(due, time.monotonic())

    def _refuse_late(self, now: float) -> None:
        """Refuse running jobs whose deadline has passed, unless their answer has begun.

        The worker is told, and its answer is dropped.
        """
        for job in [job for job, due in self._deadlines.items() if due <= now]:
            if job.late:  # It was refused with another part of its request.
                continue
            self._deadlines.pop(job, None)
            if not job.gone and self._is_running(job):
                self._refuse_running(job)
        if (earliest := min(self._deadlines.values(), default=NEVER)) < self._timer_at:
            self._set_timer(earliest, now)

    def _is_running(self, job: Job) -> bool:
        """Tell whether a worker has a job whose answer has not begun."""
        return any(channel.holds(job) for channel in self._all_channels)

    def _refuse_running(self, job: Job) -> None:
        self._reject(job, self._deadline_error(has_begun=True))
        self._give_up(job)

    def _give_up(self, job: Job) -> None:
        """Drop the future answer of a job, which counts as open until its worker has finished."""
        self._restarted.discard(job)
        self._deadlines[job] = NEVER
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

    def _make_room_for(self, job: Job) -> bool:
        """Refuse the least urgent request of a full queue, for a job of higher priority."""
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

        While workers serve, its text is made only once per reply, since an overloaded server must
        refuse quickly.
        """
        by_items = len(self.queue.jobs) >= self.bounds.items
        if self._full_error is None or self._full_error[0] != by_items or not self.channels:
            self._full_error = self._full_message(by_items)
        _, text, seconds = self._full_error
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

    def _skip_error(self, job: Job) -> TsxError:
        if job.gone:
            return ClientLeft(
                f"{self.label} did not start the request before its client disconnected."
            )
        return self._deadline_error(has_begun=job in self._restarted)

    def _deadline_error(self, *, has_begun: bool) -> DeadlinePassed:
        seconds = self._seconds_to_empty()
        text = (
            f"{self.label} did not {'answer' if has_begun else 'start'} the request before its"
            f" deadline; try again in {seconds} s."
        )
        return (AnswerLate if has_begun else DeadlinePassed)(text, retry_after=seconds)

    def _seconds_to_empty(self) -> int:
        """Estimate the seconds until workers that serve or start have done the waiting requests."""
        seconds_until_start = 0.0 if self.channels else self.seconds_until_ready() or 0.0
        return retry_after(
            len(self.queue), self.service_rate.rate * (len(self.channels) or 1), seconds_until_start
        )

    def _refuse(self, job: Job, error: TsxError) -> None:
        self._deadlines.pop(job, None)
        self._restarted.discard(job)
        if not job.late:  # A late job was refused already.
            self._reject(job, error)
        self._close(1)

    def _close(self, jobs: int) -> None:
        self._open_jobs -= jobs
        self.stats.ended += jobs
        if not self._open_jobs:
            self._idle.set()
