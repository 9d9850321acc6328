"""The state behind a latency target: the curve, the rate of arrivals, and what of both is kept until something changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.slo.curve import LatencyCurve
from tsx_runtime.core.slo.decision import admission, aim, batch_size, expected_end

STEP = 0.01  # of the target, by which the margin changes for each miss
LARGEST = 0.05  # for a batch
LEAST, MOST = 0.5, 0.95  # margin
MEMORY = 1.0  # seconds after which an arrival weighs about a third of what it did


class HeldBatches(NamedTuple):
    """What a worker has: when the first batch began, and the sizes of all."""

    began: float
    sizes: Sequence[int]


class SloControl:
    """Decides for one version; its caller has the queue, the workers and the clock."""

    def __init__(self, target: LatencyTarget, curve: LatencyCurve) -> None:
        self.target = target
        self.curve = curve
        self.margin = MOST  # the share of the target that requests are accepted by; the rest is for what the curve does not tell
        self.aim = aim(curve, target.seconds * self.margin, 0.0, 1)
        self.waiting = 0  # requests that may wait, as far as was asked
        self.opens = 0.0  # when one more may
        self._arrivals = 0.0
        self._counted = 0  # since `_since`
        self._since = 0.0
        self._workers = 1

    def retarget(self, target: LatencyTarget) -> None:
        self.target = target
        self.curve.retarget(target.quantile)
        self._renew_aim(self._workers)

    def offered(self) -> None:
        """A request arrived, whether it is accepted or not."""
        self._counted += 1

    def learn(self, size: int, seconds: float, now: float, workers: int, missed: int) -> None:
        """A batch was answered, `missed` of its requests too late.

        A miss makes the margin smaller by much, an answer in time larger by little: in overload the share of misses comes to what the
        target allows. A batch that takes longer than the target by itself does not count, since no admission could avoid that.
        """
        self.curve.add(size, seconds, now)
        if seconds <= self.target.seconds:
            change = STEP * ((1 - self.target.quantile) * size - missed)
            self.margin = min(MOST, max(LEAST, self.margin + max(change, -LARGEST)))
        self._renew(now, workers)

    def sent(self, size: int, *, cut: bool) -> None:
        """A batch of that size has left; see `LatencyCurve.sent`."""
        self.curve.sent(size, cut=cut)
        self.changed()

    def changed(self) -> None:
        """Workers have come, gone, or have another batch: what may wait is to be found again."""
        self.waiting, self.opens = 0, 0.0

    def admits(self, arrivals: Sequence[float], held: Iterable[HeldBatches], now: float) -> bool:
        """Whether a request that arrives now, behind those that wait, is answered in time; `opens` says when one could be."""
        if len(arrivals) < self.waiting:
            return True
        if now >= self.opens:
            free = [self.end(each, now) for each in held]
            self.waiting, self.opens = admission(self.curve, self.target.seconds, self.aim, arrivals, free, now)
        return len(arrivals) < self.waiting

    def end(self, held: HeldBatches, now: float) -> float:
        return expected_end(held.began, held.sizes, self.curve, now)

    def batch_size(self, arrivals: Iterable[float], start: float, most: int) -> int:
        size = batch_size(self.curve, self.target.seconds, arrivals, start, self.aim.size)
        if size == self.curve.most and self.curve.capped:  # some more, to see whether other limits let it pass
            size += size // 8 + 1
        return min(size, most)

    def _renew(self, now: float, workers: int) -> None:
        passed = max(now - self._since, 1e-9)
        keep = math.exp(-passed / MEMORY)
        self._arrivals = self._arrivals * keep + self._counted / passed * (1 - keep)
        self._counted, self._since = 0, now
        self._renew_aim(workers)

    def _renew_aim(self, workers: int) -> None:
        self._workers = workers
        self.aim = aim(self.curve, self.target.seconds * self.margin, self._arrivals, workers)
        self.changed()
