"""The dispatcher of a version with a latency target: its batches are as large as the target allows, and what would be late is refused."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime import wire
from tsx_runtime.core.scheduling.batching import Assignment, assign
from tsx_runtime.core.scheduling.channel import Channel, SentBatch
from tsx_runtime.core.scheduling.dispatcher import Bounds, Dispatcher
from tsx_runtime.core.scheduling.job import Job, LateJob
from tsx_runtime.core.scheduling.queue import BatchLimits, RequestQueue
from tsx_runtime.core.scheduling.service_rate import retry_after
from tsx_runtime.core.slo.attainment import Attainment, SloReport
from tsx_runtime.core.slo.control import HeldBatches, SloControl
from tsx_runtime.core.slo.curve import LatencyCurve
from tsx_runtime.errors import ClientLeft, QueueFull, TsxError


class SloDispatcher(Dispatcher):
    """The largest batch and the length of the queue follow from the target; `limits.max_items` bounds the first.

    `bounds.items` is how many requests may wait as far as was asked: `submit` asks again once so many do.
    """

    def __init__(
        self,
        label: str,
        limits: BatchLimits,
        bounds: Bounds,
        target: LatencyTarget,
        points: Iterable[tuple[int, float]] = (),
        queue: RequestQueue | None = None,
    ) -> None:
        """`points`: batch sizes and their seconds, as a benchmark measured them on this machine."""
        super().__init__(label, limits, bounds._replace(items=0), queue)
        self.control = SloControl(target, LatencyCurve(target.quantile, points))
        self.attainment = Attainment()

    @property
    def report(self) -> SloReport:
        return self.attainment.report(self.control.target, self.control.aim.size, max(1, self.bounds.items, self.pending))

    def submit(self, job: Job) -> None:
        self.control.offered()
        if len(self.queue.jobs) >= self.bounds.items and (self.accepting or self.wake()):
            admitted = self._admits()
            if not admitted and self._flush_due:
                self._flush()
                admitted = self._admits()
            self.bounds = self.bounds._replace(items=self.control.waiting if admitted else len(self.queue.jobs))
        super().submit(job)

    def _admits(self) -> bool:
        return self.control.admits(self._arrivals(), self._held(), time.monotonic())

    def change(self, limits: BatchLimits, bounds: Bounds) -> None:
        if bounds.slo is not None:
            self.control.retarget(bounds.slo)
        super().change(limits, bounds._replace(items=0))

    def add(self, channel: Channel) -> None:
        self._ask_again()
        super().add(channel)

    def remove(self, channel: Channel) -> None:
        super().remove(channel)
        self._ask_again()

    def on_reply(self, channel: Channel, sent: SentBatch, frame: wire.Frame) -> None:
        now = time.monotonic()
        due = now - self.control.target.seconds
        missed = sum([job.arrived < due or isinstance(job, LateJob) for job in sent.jobs])
        if not sent.deaths:
            self.control.learn(len(sent.jobs), now - max(sent.at, channel.replied), now, len(self.channels), missed)
        self._ask_again()
        super().on_reply(channel, sent, frame)
        self.attainment.add(len(sent.jobs) - missed, missed)

    def _decide(self, now: float) -> Assignment[Channel]:
        """Where no worker is idle, what leaves early begins when a worker is done."""
        ends = [self.control.end(held, now) for held in self._held()]
        limits = self.limits._replace(max_items=self.control.batch_size(self._arrivals(), min(ends, default=now), self.limits.max_items))
        todo = assign(self.queue, self.channels, now, limits, self.service_rate.short)
        for _, jobs in todo.batches:
            self.control.sent(len(jobs), cut=len(jobs) < limits.max_items and bool(self.queue.jobs))
        if todo.batches or todo.retries:
            self._ask_again()
        return todo

    def _arrivals(self) -> list[float]:
        """In the order in which they are served; where that is another than that of arrival, as if it were not."""
        arrivals = [job.arrived for job in self.queue.jobs]
        return sorted(arrivals) if self.queue.ordered else arrivals

    def _held(self) -> Iterator[HeldBatches]:
        for channel in self.channels:
            sent = channel.sent
            yield HeldBatches(max(sent[0].at, channel.replied) if sent else 0.0, [len(batch.jobs) for batch in sent])

    def _ask_again(self) -> None:
        """What a worker holds has changed, and with it how many requests may wait."""
        self.control.changed()
        self.bounds = self.bounds._replace(items=0)

    def _queue_full(self) -> QueueFull:
        self.attainment.refused += 1
        return super()._queue_full()

    def _word_full(self, by_items: bool) -> tuple[bool, str, int]:
        if not by_items:
            return super()._word_full(by_items)
        until = self.control.opens - time.monotonic() if self.channels else self.seconds_until_ready() or 0.0
        seconds = retry_after(0, 0.0, until)
        text = f"{self._no_worker_text()}. It would not be answered in time (slo: {self.control.target.text}); try again in {seconds} s."
        return by_items, text, seconds

    def _refuse(self, job: Job, error: TsxError) -> None:
        if not isinstance(error, ClientLeft | QueueFull):  # the client no longer waits, or it is counted as refused
            self.attainment.add(0, 1)
        super()._refuse(job, error)
