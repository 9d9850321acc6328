"""The decisions for a latency target, which use the latency curve and the arrival rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.models.latency_curve import LatencyCurve
from tsx_runtime.features.slo.decision import admission, aim, batch_size, expected_end, factor, fill
from tsx_runtime.features.slo.weights import RequestWeights

MARGIN_STEP = 0.05  # reduction of the margin after a batch whose requests all miss the target
MIN_MARGIN, MAX_MARGIN = 0.5, 1.45
NORMAL_MARGIN = 0.95  # fraction of the target within which requests are normally accepted
# How much the accepted probability of lateness grows per 1 of margin above NORMAL_MARGIN.
RISK_FACTOR = 20
ARRIVAL_MEMORY_S = 1.0  # time after which an arrival counts about a third


class WorkerBatches(NamedTuple):
    """The batches of a worker: when the first one began, and the sizes of all."""

    began: float
    sizes: Sequence[float]


class SloControl:
    """The decisions for one version; its caller has the queue, the workers and the clock.

    If `weighs` is true, the caller also passes the weights of requests.
    """

    def __init__(self, target: LatencyTarget, curve: LatencyCurve) -> None:
        self.target = target
        self.weights = RequestWeights(curve)
        # The fraction of the target within which requests are accepted. It leaves time for other
        # delays, which are missing in the curve.
        self.margin = NORMAL_MARGIN
        self.aim = aim(curve, target.seconds * NORMAL_MARGIN, 0.0, 1)
        self.waiting = 0.0  # number of requests that may wait, as far as it is known
        self.opens_at = 0.0  # time at which one more request may wait
        self._arrivals = 0.0
        self._new_arrivals = 0.0  # arrivals after `_counted_from`
        self._counted_from = 0.0
        self._workers = 1

    @property
    def curve(self) -> LatencyCurve:
        return self.weights.curve

    @property
    def weighs(self) -> bool:
        """Whether requests have weights other than 1."""
        return self.weights.share > 0

    @property
    def caution(self) -> float:
        """A value from 0 to 1 that grows with the fraction of missed targets."""
        return max(0.0, (NORMAL_MARGIN - self.margin) / (NORMAL_MARGIN - MIN_MARGIN))

    def retarget(self, target: LatencyTarget) -> None:
        self.target = target
        self.weights.retarget(target.quantile)
        self._renew_aim(self._workers)

    def count_arrival(self, weight: float = 1.0) -> None:
        """Count a request that arrived, whether it is accepted or not."""
        self._new_arrivals += weight

    def learn(
        self,
        requests: int,
        seconds: float,
        now: float,
        workers: int,
        missed: int,
        cost: float = 0.0,
    ) -> None:
        """Learn from an answered batch.

        A miss reduces the margin by much, and an answer in time raises it by little. In overload,
        the fraction of misses thus approaches the one that the target allows. A batch does not
        count if a request alone would have missed the target. A margin above NORMAL_MARGIN accepts
        requests that are late more often than the target allows. This affects only the longest
        waits, so all requests together still keep the target.

        Args:
            requests: The number of requests.
            seconds: The duration of the batch.
            now: The current time.
            workers: The number of workers.
            missed: The number of requests that were answered too late.
            cost: The cost of all requests, or 0 if it is unknown.
        """
        self.weights.add(requests, cost, seconds, now)
        size = max(1.0, self.weights.weigh(requests, cost)) if cost else requests
        if seconds * self.curve.typical(1) <= self.target.seconds * self.curve.typical(size):
            change = (
                MARGIN_STEP
                * ((1 - self.target.quantile) * requests - missed)
                / max(requests, self.aim.size)
            )
            self.margin = min(MAX_MARGIN, max(MIN_MARGIN, self.margin + change))
            late_probability = (1 - self.target.quantile) * (
                1 + RISK_FACTOR * max(0.0, self.margin - NORMAL_MARGIN)
            )
            # The lowest quantile of the curve is the median.
            self.weights.set_quantile(1 - min(late_probability, 0.5))
        self._renew(now, workers)

    def sent(self, size: float, *, cut: bool) -> None:
        """Note that a batch was sent; see `LatencyCurve.sent`."""
        self.curve.sent(size, cut=cut)
        self.invalidate()

    def invalidate(self) -> None:
        """Forget how many requests may wait, because workers or their batches have changed."""
        self.waiting, self.opens_at = 0.0, 0.0

    def admits(
        self,
        arrivals: Sequence[float],
        worker_batches: Iterable[WorkerBatches],
        now: float,
        weights: Callable[[], Sequence[float]] = tuple,
        weight: float = 1.0,
        outlook: Callable[[float], tuple[float, float]] = lambda now: (now, 0.0),
    ) -> bool:
        """Tell whether a new request would be answered in time after the waiting ones.

        If not, `opens_at` is the time at which one could be.

        Args:
            arrivals: The arrival times of the waiting requests.
            worker_batches: The batches of each worker.
            now: The current time.
            weights: Returns the weights of the waiting requests. It is called only if necessary.
            weight: The weight of the new request.
            outlook: Returns when other models leave the device, and their pause after each batch.
        """
        waiting = len(arrivals)
        is_large = weight > self.aim.size
        if is_large or (waiting + weight > self.waiting and now >= self.opens_at):
            start, pause = outlook(now)
            free = [max(start, self.end(batches, now)) for batches in worker_batches]
            plan = self.aim
            # A request that is larger than the planned batches has to start earlier.
            if is_large:
                seconds = self.target.seconds
                duration = self.curve.typical(weight) * factor(self.curve, seconds)
                plan = plan._replace(
                    wait=max(0.0, seconds * min(self.margin, NORMAL_MARGIN) - duration)
                )
            self.waiting, self.opens_at = admission(
                self.curve, self.target.seconds, plan, arrivals, free, now, weights(), weight, pause
            )
        admitted = waiting + weight <= self.waiting
        self.waiting -= (weight - 1) * admitted
        return admitted

    def next_duration(self, waiting: float) -> float:
        """Return the expected seconds of the next batch, for a number of waiting requests."""
        curve = self.curve
        return (
            curve.typical(min(waiting, self.aim.size)) * curve.mean
            if curve.known
            else self.aim.duration
        )

    def longest(self, size: float) -> float:
        """Return a batch's seconds at the target's quantile, or 0 if none was measured."""
        return self.curve.typical(size) * self.curve.tail if self.curve.known else 0.0

    def end(self, batches: WorkerBatches, now: float) -> float:
        return expected_end(batches.began, batches.sizes, self.curve, now)

    def batch_size(
        self, arrivals: Sequence[float], start: float, max_size: int, weights: Sequence[float] = ()
    ) -> int:
        """Return the number of requests of the next batch."""
        if not arrivals:
            return 1
        size = batch_size(
            self.curve, self.target.seconds, arrivals, start, self.aim.size, weights or repeat(1)
        )
        # Other limits have reduced the batches. A slightly larger one shows whether they still do.
        if size == self.curve.max_size and self.curve.is_capped:
            size += size // 8 + 1
        if weights:
            count, total = fill(size, weights, 0, len(arrivals))
            size = count + max(0.0, size - total) * (count == len(arrivals))
        return min(int(size), max_size)

    def _renew(self, now: float, workers: int) -> None:
        elapsed = max(now - self._counted_from, 1e-9)
        decay = math.exp(-elapsed / ARRIVAL_MEMORY_S)
        self._arrivals = self._arrivals * decay + self._new_arrivals / elapsed * (1 - decay)
        self._new_arrivals, self._counted_from = 0.0, now
        self._renew_aim(workers)

    def _renew_aim(self, workers: int) -> None:
        self._workers = workers
        self.aim = aim(
            self.curve,
            self.target.seconds * min(self.margin, NORMAL_MARGIN),
            self._arrivals,
            workers,
        )
        self.invalidate()
