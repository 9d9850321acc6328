"""The dispatcher of a version with a latency target.

Its batches are as large as the target allows, and requests that would be late are refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime import wire
from tsx_runtime.core.models.latency_curve import LatencyCurve
from tsx_runtime.core.scheduling.batching import Assignment, assign
from tsx_runtime.core.scheduling.channel import Channel, SentBatch
from tsx_runtime.core.scheduling.costs import CostQueue
from tsx_runtime.core.scheduling.dispatcher import Bounds, Dispatcher
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue
from tsx_runtime.core.scheduling.service_rate import LatencyCapacity, retry_after
from tsx_runtime.errors import ClientLeft, QueueFull, TsxError
from tsx_runtime.features.slo.arbitration import OVERDUE_FACTOR, Claim, DeviceArbiter
from tsx_runtime.features.slo.attainment import Attainment
from tsx_runtime.features.slo.control import SloControl, WorkerBatches
from tsx_runtime.features.slo.decision import throughput


class SloDispatcher(Dispatcher):
    """A dispatcher whose batch size and queue length follow from a latency target.

    `limits.max_items` limits the batch size. `bounds.items` is the number of requests that may
    wait, as far as is known. When as many wait, `submit` determines it again.
    """

    def __init__(
        self,
        label: str,
        limits: BatchLimits,
        bounds: Bounds,
        target: LatencyTarget,
        points: Iterable[tuple[int, float]] = (),
        queue: RequestQueue | None = None,
        arbiter: DeviceArbiter | None = None,
    ) -> None:
        """Begin with the curve of a benchmark.

        Args:
            label: The name of the version.
            limits: The limits of a batch.
            bounds: The limits of the queue.
            target: The latency target.
            points: Batch sizes with their seconds, measured on this machine.
            queue: The queue of requests.
            arbiter: The arbiter of all dispatchers that share devices.
        """
        super().__init__(label, limits, bounds._replace(items=0), queue)
        self.control = SloControl(target, LatencyCurve(target.quantile, points))
        self.attainment = Attainment()
        self._arbiter = DeviceArbiter(1) if arbiter is None else arbiter
        self._arbiter.join(self)

    @property
    def current_limits(self) -> dict[str, int]:
        return {
            "batch_size": self.control.aim.size,
            "job_queue_size": max(1, self.bounds.items, self.pending),
        }

    @property
    def latency_capacity(self) -> LatencyCapacity | None:
        control = self.control
        if not control.curve.known:
            return None
        seconds = control.target.seconds * min(control.margin, 1.0)
        return LatencyCapacity(control.target, partial(throughput, control.curve, seconds))

    def submit(self, job: Job) -> None:
        """Queue a request, or refuse it if it would be late."""
        weight = self._weight([job])
        self.control.count_arrival(weight)
        if (len(self.queue.jobs) >= self.bounds.items or weight != 1) and (
            self.accepting or self.wake()
        ):
            admitted = self._admits(weight)
            if not admitted and self._flush_due:
                self._flush()
                admitted = self._admits(weight)
            room = max(1, int(self.control.waiting) - len(self.queue.jobs)) if weight == 1 else 1
            self.bounds = self.bounds._replace(items=len(self.queue.jobs) + room * admitted)
        super().submit(job)

    def _admits(self, weight: float) -> bool:
        now = time.monotonic()
        # If the target cannot be kept anyway, other models are not considered.
        if not self.control.aim.wait or not self._arbiter.is_crowded(self, now):
            return self.control.admits(
                self._arrivals(), self._worker_batches(), now, self._weights, weight
            )
        outlook = partial(self._arbiter.outlook, self)
        return self.control.admits(
            self._arrivals(), self._worker_batches(), now, self._weights, weight, outlook
        )

    def change(self, limits: BatchLimits, bounds: Bounds) -> None:
        if bounds.slo is not None:
            self.control.retarget(bounds.slo)
        super().change(limits, bounds._replace(items=0))

    def add(self, channel: Channel) -> None:
        self._invalidate_bounds()
        self._arbiter.notify_change()
        super().add(channel)

    def remove(self, channel: Channel) -> None:
        super().remove(channel)
        self._invalidate_bounds()
        self._arbiter.notify_change()

    def close(self) -> None:
        super().close()
        self._arbiter.leave(self)

    # The methods below are called by the arbiter.

    def claim(self, now: float) -> Claim | None:
        queue = self.queue
        if not queue.jobs and not queue.suspects:
            return None
        oldest = queue.suspects[0].jobs[0] if queue.suspects else queue.jobs[0]
        return Claim(
            oldest.arrived,
            self.control.target.seconds,
            self.control.next_duration(max(1, len(queue.jobs))),
        )

    def next_batch(self, now: float) -> Claim:
        return Claim(now, self.control.target.seconds, self.control.aim.duration)

    @property
    def caution(self) -> float:
        return self.control.caution

    def expected_end(self, channel: Channel, now: float) -> float:
        return self.control.end(self._batches_of(channel), now)

    def overdue(self, channel: Channel) -> float:
        batches = self._batches_of(channel)
        return batches.began + OVERDUE_FACTOR * max(
            self.control.longest(batches.sizes[0]), self.control.target.seconds
        )

    def start(self) -> None:
        self._flush()

    def on_reply(self, channel: Channel, sent: SentBatch, frame: wire.Frame) -> None:
        """Learn from the reply of a worker before it is delivered."""
        now = time.monotonic()
        latest_arrival = now - self.control.target.seconds
        missed = sum([job.arrived < latest_arrival or job.late for job in sent.jobs])
        if not sent.deaths:
            seconds, cost = now - max(sent.sent_at, channel.replied), sum(self._costs(sent.jobs))
            self.control.learn(len(sent.jobs), seconds, now, len(self.channels), missed, cost)
        self._invalidate_bounds()
        if self._arbiter.is_blocking:
            self._arbiter.start_next()
        super().on_reply(channel, sent, frame)
        self.attainment.add(len(sent.jobs) - missed, missed)

    def _decide(self, now: float) -> Assignment[Channel]:
        """Choose the next batches; without an idle worker, they begin when one will be free."""
        ends = [self.control.end(batches, now) for batches in self._worker_batches()]
        weights, start = self._weights(), min(ends, default=now)
        limits = self.limits._replace(
            max_items=self.control.batch_size(
                self._arrivals(), start, self.limits.max_items, weights
            )
        )
        # The batch may take requests of similar cost instead of the first ones. Their cost must not
        # be higher.
        if weights and limits.max_cost < NEVER:
            limits = limits._replace(
                max_cost=min(
                    limits.max_cost, sum(self._costs(islice(self.queue.jobs, limits.max_items)))
                )
            )
        assignment = assign(
            self.queue, self._free(now), now, limits, self.service_rate.has_short_batches
        )
        for _, jobs in assignment.batches:
            self.control.sent(
                self._weight(jobs), cut=len(jobs) < limits.max_items and bool(self.queue.jobs)
            )
        sent = bool(assignment.batches or assignment.retries)
        if sent:
            self._invalidate_bounds()
        if (
            assignment.skipped or (sent and (self.queue.jobs or self.queue.suspects))
        ) and self._arbiter.is_crowded(self, now):
            # Other models may have waited for the skipped requests.
            self._loop.call_soon(self._arbiter.start_next)
        return assignment

    def _free(self, now: float) -> Sequence[Channel]:
        """Return the workers that may get a batch."""
        if not self._arbiter.is_crowded(self, now):
            return self.channels
        channel = self._arbiter.granted(self, now)
        return [] if channel is None else [channel]

    def _arrivals(self) -> list[float]:
        """Return the arrival times in the order of service, or sorted if that order differs."""
        arrivals = [job.arrived for job in self.queue.jobs]
        return sorted(arrivals) if self.queue.is_ordered else arrivals

    def _worker_batches(self) -> Iterator[WorkerBatches]:
        return map(self._batches_of, self.channels)

    def _batches_of(self, channel: Channel) -> WorkerBatches:
        sent = channel.sent
        return WorkerBatches(
            max(sent[0].sent_at, channel.replied) if sent else 0.0,
            [self._weight(batch.jobs) for batch in sent],
        )

    def _costs(self, jobs: Iterable[Job]) -> Sequence[float]:
        """Return the costs of requests; an unknown cost is replaced by the bytes of the body."""
        queue = self.queue
        if isinstance(queue, CostQueue):
            return [cost if (cost := queue.cost(job)) < NEVER else len(job.body) for job in jobs]
        return [len(job.body) for job in jobs]

    def _weight(self, jobs: Sequence[Job]) -> float:
        return (
            self.control.weights.weigh(len(jobs), sum(self._costs(jobs)))
            if self.control.weighs
            else len(jobs)
        )

    def _weights(self) -> list[float]:
        return (
            [self.control.weights.weigh(1, cost) for cost in self._costs(self.queue.jobs)]
            if self.control.weighs
            else []
        )

    def _invalidate_bounds(self) -> None:
        """Forget how many requests may wait, because the work of a worker has changed."""
        self.control.invalidate()
        self.bounds = self.bounds._replace(items=0)

    def _queue_full(self) -> QueueFull:
        self.attainment.refused += 1
        return super()._queue_full()

    def _full_message(self, by_items: bool) -> tuple[bool, str, int]:
        if not by_items:
            return super()._full_message(by_items)
        seconds_until_room = (
            self.control.opens_at - time.monotonic()
            if self.channels
            else self.seconds_until_ready() or 0.0
        )
        seconds = retry_after(0, 0.0, seconds_until_room)
        text = (
            f"{self._no_worker_text()}. It would not be answered in time (slo:"
            f" {self.control.target.text}); try again in {seconds} s."
        )
        return by_items, text, seconds

    def _refuse(self, job: Job, error: TsxError) -> None:
        # A client that has left misses nothing, and a full queue is counted in `_queue_full`.
        if not isinstance(error, ClientLeft | QueueFull):
            self.attainment.add(0, 1)
        super()._refuse(job, error)
