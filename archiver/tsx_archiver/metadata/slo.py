"""Service level objectives.

`tsx bench` takes bounds such as `p50<20ms,errors<0.1%`, and a model takes a target such as
`p99<50ms`. For text generation, `ttft.p99<300ms` bounds the time to the first token, and
`tpot.p99<50ms` the time per output token.
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
STREAM_TIMES = ("ttft", "tpot")  # prefixes of percentiles, for event streams
_BOUND = re.compile(
    r"\s*(?:(ttft|tpot)\.)?(p50|p90|p95|p99|p99\.9|mean|max|errors)\s*<=?\s*(\d{1,9}(?:\.\d+)?)\s*(us|ms|s|%)\s*"
)
_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0}


class Bound(NamedTuple):
    """An upper bound of one figure.

    Attributes:
        figure: A latency in milliseconds, with the prefix `ttft.` or `tpot.` for event streams, or
            `errors`, the fraction of failed requests.
        limit: The bound.
        text: The bound as the user wrote it.
    """

    figure: str
    limit: float
    text: str


class Slo(NamedTuple):
    """The bounds of a service level objective."""

    bounds: tuple[Bound, ...]

    @property
    def errors(self) -> float:
        """The fraction of requests that may fail; the default is 0."""
        return next((bound.limit for bound in self.bounds if bound.figure == "errors"), 0.0)

    @property
    def _latency_bounds(self) -> list[Bound]:
        """The bounds of whole responses."""
        return [
            bound for bound in self.bounds if bound.figure != "errors" and "." not in bound.figure
        ]

    @property
    def of_streams(self) -> list[Bound]:
        """The bounds of event streams."""
        return [bound for bound in self.bounds if "." in bound.figure]

    @property
    def tightest_ms(self) -> float:
        """The smallest bound of a response's time; infinite if there is none."""
        return min((bound.limit for bound in self._latency_bounds), default=math.inf)

    @property
    def limits(self) -> dict[str, float]:
        """The limits in milliseconds within which a single response counts for the goodput.

        The keys are `""` for its latency, `ttft` and `tpot`. The greatest limit of all percentiles
        counts. A mean does not, since it is a figure of many responses.
        """
        limits: dict[str, float] = {}
        for bound in self.bounds:
            prefix, _, name = bound.figure.rpartition(".")
            if name not in ("errors", "mean_ms"):
                limits[prefix] = max(bound.limit, limits.get(prefix, 0.0))
        return limits

    def broken(self, latency: Mapping[str, float], errors: float) -> list[Bound]:
        """Return the bounds that the figures of a run exceed.

        A bound of event streams counts as exceeded if the run had none.

        Args:
            latency: The figures of a run.
            errors: The fraction of failed requests.
        """
        exceeded = [
            bound
            for bound in self.bounds
            if bound.figure != "errors" and latency.get(bound.figure, math.inf) > bound.limit
        ]
        if errors > self.errors:
            limits = [bound for bound in self.bounds if bound.figure == "errors"]
            exceeded += limits or [Bound("errors", 0.0, "errors<=0%")]
        return exceeded

    def latency_ratio(self, latency: Mapping[str, float]) -> float:
        """Return the largest ratio of a latency to its bound; above 1, a bound is exceeded."""
        ratios = (latency[bound.figure] / bound.limit for bound in self._latency_bounds)
        return max(ratios, default=0.0)

    def __str__(self) -> str:
        return ",".join(bound.text for bound in self.bounds)


class LatencyTarget(NamedTuple):
    """The latency target of a model.

    Attributes:
        text: The target as the user wrote it.
        quantile: The fraction of accepted requests that must be answered in time.
        seconds: The time.
    """

    text: str
    quantile: float
    seconds: float


def parse_slo(text: str) -> Slo:
    """Parse bounds that are separated by commas.

    Raises:
        ValueError: A bound is invalid.
    """
    bounds = []
    for part in text.split(","):
        match = _BOUND.fullmatch(part)
        is_error_rate = match is not None and match[2] == "errors"
        if match is None or is_error_rate != (match[4] == "%") or (is_error_rate and match[1]):
            raise ValueError(
                f"'{part.strip()}' is not a bound. A bound is a metric and a limit, such as"
                f" p99<100ms or errors<0.1%; there are {', '.join(PERCENTILES)} and errors, and of"
                " event streams ttft.p99, tpot.p99 and so on; separate several with commas"
            )
        limit = float(match[3])
        if limit <= 0 and not is_error_rate:
            raise ValueError(
                f"'{part.strip()}' is a bound that no answer can meet; give a time above 0"
            )
        figure = (
            "errors"
            if is_error_rate
            else f"{match[1]}.{PERCENTILES[match[2]]}"
            if match[1]
            else PERCENTILES[match[2]]
        )
        value = limit / 100 if is_error_rate else limit * _MS[match[4]]
        bounds.append(Bound(figure, value, part.strip()))
    figures = [bound.figure for bound in bounds]
    for bound in bounds:
        if figures.count(bound.figure) > 1:
            raise ValueError(f"{bound.text.partition('<')[0]} is bounded twice; give one limit")
    return Slo(tuple(bounds))


def latency_target(text: str) -> LatencyTarget:
    """Parse the target of a model.

    Raises:
        ValueError: The text does not consist of one percentile and a time.
    """
    bounds = parse_slo(text).bounds
    percentile = bounds[0].text.partition("<")[0].strip()
    if len(bounds) > 1 or not percentile.startswith("p"):
        raise ValueError(
            f"'{text}' is not the target of a model: it must be one percentile and a time, such as"
            " p99<50ms"
        )
    return LatencyTarget(text.strip(), float(percentile[1:]) / 100, bounds[0].limit / 1000)


def checked_target(value: str) -> str:
    """Check a target, and return it without spaces around it.

    Raises:
        ValueError: The text is not a target.
    """
    return latency_target(value).text
