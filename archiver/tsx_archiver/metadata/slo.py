"""Service level objectives: the bounds of `tsx bench`, such as `p50<20ms,errors<0.1%`, and the
target of a model, such as `p99<50ms`.

Text generation has bounds of its own: `ttft.p99<300ms`, of the time to the first token, and
`tpot.p99<50ms`, of the time per output token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

PERCENTILES = {
    "p50": "p50_ms",
    "p90": "p90_ms",
    "p95": "p95_ms",
    "p99": "p99_ms",
    "p99.9": "p999_ms",
    "mean": "mean_ms",
    "max": "max_ms",
}
STREAM_TIMES = (
    "ttft",
    "tpot",
)  # what stands before a percentile, of answers that are event streams
_BOUND = re.compile(
    r"\s*(?:(ttft|tpot)\.)?(p50|p90|p95|p99|p99\.9|mean|max|errors)\s*<=?\s*(\d{1,9}(?:\.\d+)?)\s*(us|ms|s|%)\s*"
)
_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0}


class Bound(NamedTuple):
    """`figure` is a field of a latency in milliseconds, of an event stream with `ttft.` or `tpot.`
    before it, or `errors`, a share.

    No value may be above `limit`.
    """

    figure: str
    limit: float
    text: str


class Slo(NamedTuple):
    bounds: tuple[Bound, ...]

    @property
    def errors(self) -> float:
        """The share of requests that may fail: none where nothing is said."""
        return next((bound.limit for bound in self.bounds if bound.figure == "errors"), 0.0)

    @property
    def _of_answers(self) -> list[Bound]:
        """Those of the time of a whole answer."""
        return [
            bound for bound in self.bounds if bound.figure != "errors" and "." not in bound.figure
        ]

    @property
    def of_streams(self) -> list[Bound]:
        return [bound for bound in self.bounds if "." in bound.figure]

    @property
    def tightest_ms(self) -> float:
        """The least bound of the time of an answer; infinite without one."""
        return min((bound.limit for bound in self._of_answers), default=math.inf)

    @property
    def limits(self) -> dict[str, float]:
        """What a single answer may take, in milliseconds, to count for the goodput: `""` its
        latency, `ttft`, `tpot`.

        Of several percentiles the one with the greatest limit counts, and no mean, which is of many
        answers.
        """
        found: dict[str, float] = {}
        for bound in self.bounds:
            part, _, name = bound.figure.rpartition(".")
            if name not in ("errors", "mean_ms"):
                found[part] = max(bound.limit, found.get(part, 0.0))
        return found

    def broken(self, latency: Mapping[str, float], errors: float) -> list[Bound]:
        """The bounds that do not hold.

        A run with more errors than allowed holds none of them, since failing is fast, and one
        without event streams no bound of these.
        """
        broken = [
            bound
            for bound in self.bounds
            if bound.figure != "errors" and latency.get(bound.figure, math.inf) > bound.limit
        ]
        if errors > self.errors:
            limits = [bound for bound in self.bounds if bound.figure == "errors"]
            broken += limits or [Bound("errors", 0.0, "errors<=0%")]
        return broken

    def slack(self, latency: Mapping[str, float]) -> float:
        """How many times its tightest bound of an answer's time the latency is: 1 is at the bound,
        above is beyond it; 0 without one.
        """
        return max((latency[bound.figure] / bound.limit for bound in self._of_answers), default=0.0)

    def __str__(self) -> str:
        return ",".join(bound.text for bound in self.bounds)


class LatencyTarget(NamedTuple):
    """The target of a served model: this share of the accepted requests is answered within so many
    seconds.
    """

    text: str
    quantile: float
    seconds: float


def parse_slo(text: str) -> Slo:
    """Raises ValueError."""
    bounds = []
    for part in text.split(","):
        found = _BOUND.fullmatch(part)
        share = found is not None and found[2] == "errors"
        if found is None or share != (found[4] == "%") or (share and found[1]):
            raise ValueError(
                f"'{part.strip()}' is not a bound. A bound is a metric and a limit, such as"
                f" p99<100ms or errors<0.1%; there are {', '.join(PERCENTILES)} and errors, and of"
                " event streams ttft.p99, tpot.p99 and so on; separate several with commas"
            )
        limit = float(found[3])
        if limit <= 0 and not share:
            raise ValueError(
                f"'{part.strip()}' is a bound that no answer can meet; give a time above 0"
            )
        figure = (
            "errors"
            if share
            else f"{found[1]}.{PERCENTILES[found[2]]}"
            if found[1]
            else PERCENTILES[found[2]]
        )
        bounds.append(Bound(figure, limit / 100 if share else limit * _MS[found[4]], part.strip()))
    figures = [bound.figure for bound in bounds]
    for bound in bounds:
        if figures.count(bound.figure) > 1:
            raise ValueError(f"{bound.text.partition('<')[0]} is bounded twice; give one limit")
    return Slo(tuple(bounds))


def latency_target(text: str) -> LatencyTarget:
    """Raises ValueError."""
    bounds = parse_slo(text).bounds
    percentile = bounds[0].text.partition("<")[0].strip()
    if len(bounds) > 1 or not percentile.startswith("p"):
        raise ValueError(
            f"'{text}' is not the target of a model: it must be one percentile and a time, such as"
            " p99<50ms"
        )
    return LatencyTarget(text.strip(), float(percentile[1:]) / 100, bounds[0].limit / 1000)


def checked_target(value: str) -> str:
    """The same text, if it is a target. Raises ValueError."""
    return latency_target(value).text
