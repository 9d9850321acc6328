"""The weight of a request in a batch: 1, or its cost where that explains better how long batches
take.
"""

from __future__ import annotations

from tsx_runtime.core.slo.curve import LatencyCurve

SHARES = (0.5, 1.0)  # of a request's weight, that may be its cost; the rest is the same for all
FIRST = 64  # requests whose mean cost is the unit
VARIED = 0.1  # mean deviation of batches from it, from which on curves by cost are learned
TRIED = 50  # batches, before a curve is used
BETTER = 0.8  # the scatter of a curve that takes the place of another, as a share of that


class RequestWeights:
    """Learns one curve by the number of requests, and, where their costs differ, others by weights
    of which a share is the cost.

    A request of mean cost weighs 1, so a curve by weight is used in all as one by number is.
    """

    def __init__(self, curve: LatencyCurve) -> None:
        self.curve = curve  # that is used
        self.share = 0.0
        self._curves = {0.0: curve}
        self._unit = 0.0
        self._requests = 0
        self._varied = 0.0

    def weigh(self, requests: float, cost: float, share: float | None = None) -> float:
        share = self.share if share is None else share
        return requests * (1 - share) + share * cost / self._unit if share else requests

    def add(self, requests: int, cost: float, seconds: float, now: float) -> None:
        """A batch took so long; a cost of 0 is one that is not known, and then the batch says
        nothing of costs.
        """
        for share, curve in self._curves.items():
            if cost or not share:
                curve.add(max(1.0, self.weigh(requests, cost, share)), seconds, now)
        if not cost:
            return
        if self._requests < FIRST:
            self._requests += requests
            self._unit += (cost / requests - self._unit) * requests / self._requests
            return
        self._varied += (abs(cost / requests / self._unit - 1) - self._varied) / TRIED
        if self._varied > VARIED and len(self._curves) == 1:
            self._curves |= {share: LatencyCurve(self.curve.quantile) for share in SHARES}
        share = min(self._curves, key=lambda share: self._curves[share].scatter)
        if (
            self._curves[share].scatter < BETTER * self.curve.scatter
            and self._curves[share].batches >= TRIED
        ):
            self.share, self.curve = share, self._curves[share]

    def expect(self, quantile: float) -> None:
        """From the next batch on, tails are those of this quantile."""
        for curve in self._curves.values():
            curve.quantile = quantile

    def retarget(self, quantile: float) -> None:
        for curve in self._curves.values():
            curve.retarget(quantile)
