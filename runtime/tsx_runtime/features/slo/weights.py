"""The weight of a request in a batch: 1, or its cost if that predicts the duration better."""

from __future__ import annotations

from tsx_runtime.core.models.latency_curve import LatencyCurve

COST_SHARES = (
    0.5,
    1.0,
)  # tried fractions of a weight that come from the cost; the rest is constant
UNIT_REQUESTS = 64  # number of first requests, whose mean cost becomes the unit
MIN_VARIATION = 0.1  # mean deviation of costs from the unit before curves with costs are learned
MIN_BATCHES = 50  # batches before a curve is used
MAX_SCATTER_RATIO = 0.8  # A curve replaces another one if its scatter is at most this part.


class RequestWeights:
    """The curves by number of requests and, if costs differ, by weights that include the cost.

    A request of mean cost weighs 1, so all curves are used in the same way.
    """

    def __init__(self, curve: LatencyCurve) -> None:
        self.curve = curve  # the curve in use
        self.share = 0.0
        self._curves = {0.0: curve}
        self._unit = 0.0
        self._requests = 0
        self._variation = 0.0

    def weigh(self, requests: float, cost: float, share: float | None = None) -> float:
        """Return the weight of requests with a total cost; by default for the curve in use."""
        share = self.share if share is None else share
        return requests * (1 - share) + share * cost / self._unit if share else requests

    def add(self, requests: int, cost: float, seconds: float, now: float) -> None:
        """Learn from a batch; if the cost is unknown (0), only the curve without costs learns."""
        for share, curve in self._curves.items():
            if cost or not share:
                curve.add(max(1.0, self.weigh(requests, cost, share)), seconds, now)
        if not cost:
            return
        if self._requests < UNIT_REQUESTS:
            self._requests += requests
            self._unit += (cost / requests - self._unit) * requests / self._requests
            return
        self._variation += (abs(cost / requests / self._unit - 1) - self._variation) / MIN_BATCHES
        if self._variation > MIN_VARIATION and len(self._curves) == 1:
            self._curves |= {share: LatencyCurve(self.curve.quantile) for share in COST_SHARES}
        share = min(self._curves, key=lambda share: self._curves[share].scatter)
        if (
            self._curves[share].scatter < MAX_SCATTER_RATIO * self.curve.scatter
            and self._curves[share].batches >= MIN_BATCHES
        ):
            self.share, self.curve = share, self._curves[share]

    def set_quantile(self, quantile: float) -> None:
        """Use another quantile for tails, from the next batch on."""
        for curve in self._curves.values():
            curve.quantile = quantile

    def retarget(self, quantile: float) -> None:
        for curve in self._curves.values():
            curve.retarget(quantile)
