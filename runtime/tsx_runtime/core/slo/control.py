"""The state behind a latency target: the curve, the rate of arrivals, and what of both is kept
until something changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.slo.curve import LatencyCurve
from tsx_runtime.core.slo.decision import admission, aim, batch_size, expected_end, factor, fill
from tsx_runtime.core.slo.weights import RequestWeights

STEP = 0.05  # by which the margin changes for a batch that misses as a whole
LEAST, MOST = 0.5, 1.45  # margin
FULL = 0.95  # of the target, that requests are accepted by at most
# how much more often than the target allows a request may be expected to be late, for each 1 of
# margin beyond that
RISK = 20
MEMORY = 1.0  # seconds after which an arrival weighs about a third of what it did


class HeldBatches(NamedTuple):
    """What a worker has: when the first batch began, and the sizes of all."""

    began: float
    sizes: Sequence[float]


class SloControl:
    """Decides for one version; its caller has the queue, the workers and the clock.

    Where `weighs`, it is given the weights of requests as well.
    """

    def __init__(self, target: LatencyTarget, curve: LatencyCurve) -> None:
        self.target = target
        self.weights = RequestWeights(curve)
        # the share of the target that requests are accepted by; the rest is for what the curve does
        # not tell
        self.margin = FULL
        self.aim = aim(curve, target.seconds * FULL, 0.0, 1)
        self.waiting = 0.0  # requests that may wait, as far as was asked
        self.opens = 0.0  # when one more may
        self._arrivals = 0.0
        self._counted = 0.0  # since `_since`
        self._since = 0.0
        self._workers = 1

    @property
    def curve(self) -> LatencyCurve:
        return self.weights.curve

    @property
    def weighs(self) -> bool:
        return self.weights.share > 0

    @property
    def caution(self) -> float:
        """Between 0 and 1: the more accepted requests miss the target."""
        return max(0.0, (FULL - self.margin) / (FULL - LEAST))

    def retarget(self, target: LatencyTarget) -> None:
        self.target = target
        self.weights.retarget(target.quantile)
        self._renew_aim(self._workers)

    def offered(self, weight: float = 1.0) -> None:
        """A request arrived, whether it is accepted or not."""
        self._counted += weight

    def learn(
        self,
        requests: int,
        seconds: float,
        now: float,
        workers: int,
        missed: int,
        cost: float = 0.0,
    ) -> None:
        """A batch was answered, `missed` of its requests too late; `cost`: of all its requests,
        where that is known.

        A miss makes the margin smaller by much, an answer in time larger by little: in overload the
        share of misses comes to what the target allows. A batch does not count where a request
        alone would have taken longer than the target, since no admission could avoid that. A margin
        beyond FULL accepts requests which are late more often than the target allows: as only those
        that wait for longest are, all together keep it.
        """
        self.weights.add(requests, cost, seconds, now)
        size = max(1.0, self.weights.weigh(requests, cost)) if cost else requests
        if seconds * self.curve.typical(1) <= self.target.seconds * self.curve.typical(size):
            change = (
                STEP
                * ((1 - self.target.quantile) * requests - missed)
                / max(requests, self.aim.size)
            )
            self.margin = min(MOST, max(LEAST, self.margin + change))
            late = (1 - self.target.quantile) * (1 + RISK * max(0.0, self.margin - FULL))
            self.weights.expect(
                1 - min(late, 0.5)
            )  # the median, which the curve has, is as low as it goes
        self._renew(now, workers)

    def sent(self, size: float, *, cut: bool) -> None:
        """A batch of that size has left; see `LatencyCurve.sent`."""
        self.curve.sent(size, cut=cut)
        self.changed()

    def changed(self) -> None:
        """Workers have come, gone, or have another batch: what may wait is to be found again."""
        self.waiting, self.opens = 0.0, 0.0

    def admits(
        self,
        arrivals: Sequence[float],
        held: Iterable[HeldBatches],
        now: float,
        weights: Callable[[], Sequence[float]] = tuple,
        weight: float = 1.0,
        outlook: Callable[[float], tuple[float, float]] = lambda now: (now, 0.0),
    ) -> bool:
        """Whether a request that arrives now, behind those that wait, is answered in time; `opens`
        says when one could be.

        `weights` is called only where they must be looked at: overload is no time to weigh all that
        wait for each request that is refused. `outlook`: when other models leave the device to this
        one, and for how long they take it after each of its batches.
        """
        waiting = len(arrivals)
        large = weight > self.aim.size
        if large or (waiting + weight > self.waiting and now >= self.opens):
            start, between = outlook(now)
            free = [max(start, self.end(each, now)) for each in held]
            aimed = self.aim
            if large:  # than the batches that requests are accepted for: it has to begin earlier
                seconds = self.target.seconds
                own = self.curve.typical(weight) * factor(self.curve, seconds)
                aimed = aimed._replace(wait=max(0.0, seconds * min(self.margin, FULL) - own))
            self.waiting, self.opens = admission(
                self.curve,
                self.target.seconds,
                aimed,
                arrivals,
                free,
                now,
                weights(),
                weight,
                between,
            )
        admitted = waiting + weight <= self.waiting
        self.waiting -= (weight - 1) * admitted
        return admitted

    def ahead(self, waiting: float) -> float:
        """Seconds that the next batch is expected to take, of so much that waits."""
        curve = self.curve
        return (
            curve.typical(min(waiting, self.aim.size)) * curve.mean
            if curve.known
            else self.aim.ahead
        )

    def longest(self, size: float) -> float:
        """Seconds that a batch takes at its quantile; 0 where none was measured."""
        return self.curve.typical(size) * self.curve.tail if self.curve.known else 0.0

    def end(self, held: HeldBatches, now: float) -> float:
        return expected_end(held.began, held.sizes, self.curve, now)

    def batch_size(
        self, arrivals: Sequence[float], start: float, most: int, weights: Sequence[float] = ()
    ) -> int:
        """In requests."""
        if not arrivals:
            return 1
        size = batch_size(
            self.curve, self.target.seconds, arrivals, start, self.aim.size, weights or repeat(1)
        )
        if (
            size == self.curve.most and self.curve.capped
        ):  # some more, to see whether other limits let it pass
            size += size // 8 + 1
        if weights:
            count, total = fill(size, weights, 0, len(arrivals))
            size = count + max(0.0, size - total) * (count == len(arrivals))
        return min(int(size), most)

    def _renew(self, now: float, workers: int) -> None:
        passed = max(now - self._since, 1e-9)
        keep = math.exp(-passed / MEMORY)
        self._arrivals = self._arrivals * keep + self._counted / passed * (1 - keep)
        self._counted, self._since = 0.0, now
        self._renew_aim(workers)

    def _renew_aim(self, workers: int) -> None:
        self._workers = workers
        self.aim = aim(
            self.curve, self.target.seconds * min(self.margin, FULL), self._arrivals, workers
        )
        self.changed()
