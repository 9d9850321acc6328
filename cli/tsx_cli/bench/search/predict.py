"""Predicts a configuration's throughput and latency from the curve t(n) of one worker."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import Curve, OfferedLoad, Prediction
from tsx_cli.bench.search.machine import correction
from tsx_runtime.core.slo.curve import LatencyCurve

OVERHEAD_MS = (
    0.3  # of a request, outside its worker: the client, the front end and the way between them
)
BETWEEN_MS = 0.1  # from a batch's answers to the next batch's start
# of a batch's time, in which its GPU can do nothing for another worker: a guess, which measuring
# corrects
GPU_SHARE = 0.7
TAIL = 2.33  # standard deviations to the 99th percentile


class Timing(NamedTuple):
    """A latency curve, prepared for calculations."""

    sizes: tuple[int, ...]
    times: tuple[float, ...]  # milliseconds
    busy: (
        float | None
    )  # cores that a worker keeps at work by itself; None where that was not measured
    spread: float

    def batch_ms(self, size: float) -> float:
        return 1000 * _curve(self.sizes, self.times).typical(size)


@lru_cache(maxsize=256)
def _curve(sizes: tuple[int, ...], times: tuple[float, ...]) -> LatencyCurve:
    """As the server reads it, whose batches follow from it where a model has a latency target."""
    return LatencyCurve(
        0.5, [(size, milliseconds / 1000) for size, milliseconds in zip(sizes, times, strict=True)]
    )


def timing_of(curve: Curve) -> Timing:
    """Raises ValueError where the curve has no point."""
    points = sorted(curve.points, key=lambda point: point.batch_size)
    if not points:
        raise ValueError("the curve has no point")
    shares = [
        point.cpu_ms / point.median_ms
        for point in points
        if point.cpu_ms is not None and point.median_ms > 0
    ]
    busy = sum(shares) / len(shares) if shares else None
    return Timing(
        tuple(point.batch_size for point in points),
        tuple(point.median_ms for point in points),
        busy,
        curve.spread,
    )


def slowdown(
    timing: Timing, configuration: Configuration, cores: float, active: float | None = None
) -> float:
    """How many times as long a batch takes beside the other workers' as by itself; `active` workers
    are at work at a time.
    """
    workers = configuration.workers if active is None else active
    if configuration.device != "cpu":
        return max(1.0, workers * GPU_SHARE)
    busy = timing.busy if timing.busy is not None else float(configuration.threads or 1)
    return max(1.0, workers * min(busy, cores) / cores)


def predict(
    curve: Curve,
    configuration: Configuration,
    offered: OfferedLoad,
    overhead_ms: float = OVERHEAD_MS,
    cores: int = 1,
) -> Prediction:
    """Raises ValueError where the curve has no point."""
    timing = timing_of(curve)
    if offered.mode == "open":
        return _open(timing, configuration, offered.rate or 0.0, overhead_ms, cores)
    return _closed(timing, configuration, offered.connections, overhead_ms, cores)


def capacity(timing: Timing, configuration: Configuration, cores: int) -> float:
    """Requests per second with all workers at work on full batches: no load gets more."""
    size = configuration.batch_size
    most = max(
        each / timing.batch_ms(each)
        for each in {1, size, *(measured for measured in timing.sizes if measured <= size)}
    )
    return 1000 * configuration.workers * most / slowdown(timing, configuration, cores)


def _closed(
    timing: Timing, configuration: Configuration, connections: int, overhead_ms: float, cores: int
) -> Prediction:
    """A closed loop in its steady state: while the workers run a batch each, the next one gathers.

    So the connections are in `workers` batches that run and one that waits, unless the batches are
    full and more wait, or there are not enough connections for the workers.
    """
    active = min(configuration.workers, connections)
    size = min(float(configuration.batch_size), max(1.0, connections / (configuration.workers + 1)))
    took = timing.batch_ms(size) * slowdown(timing, configuration, cores, active)
    rate = min(
        active * size / (took + BETWEEN_MS), connections / (took + overhead_ms)
    )  # per millisecond
    mean = connections / rate
    return Prediction(throughput=1000 * rate, p99_ms=mean * (1 + TAIL * timing.spread))


def _open(
    timing: Timing, configuration: Configuration, rate: float, overhead_ms: float, cores: int
) -> Prediction:
    """Estimate an open loop from its capacity: waiting grows with use / (1 - use)."""
    most = capacity(timing, configuration, cores)
    if rate >= most:
        return Prediction(throughput=most, p99_ms=math.inf)
    workers, most_in_batch, use = configuration.workers, configuration.batch_size, rate / most
    took = timing.batch_ms(1 + use * (most_in_batch - 1)) * slowdown(timing, configuration, cores)
    took *= 1 + TAIL * timing.spread
    waited = TAIL * took * use / (1 - use) / workers / most_in_batch
    running = took if most_in_batch > 1 else 0.0  # the batch that a request just missed
    return Prediction(throughput=rate, p99_ms=waited + running + took + overhead_ms)


def latency_of(prediction: Prediction, times: float = 1.0) -> dict[str, float]:
    """What bounds are held against: a prediction tells less of the distribution than a
    measurement.
    """
    p99 = prediction.p99_ms * times
    return {
        "mean_ms": p99 * 0.9,
        "p50_ms": p99 * 0.9,
        "p90_ms": p99 * 0.95,
        "p95_ms": p99 * 0.97,
        "p99_ms": p99,
        "p999_ms": p99 * 1.1,
        "max_ms": p99 * 1.3,
    }


def best_connections(
    curve: Curve,
    configuration: Configuration,
    slo: Slo | None,
    overhead_ms: float,
    cores: int,
    times: float = 1.0,
    most: int = 1024,
) -> tuple[int, Prediction]:
    """The connections with the most throughput whose latency, `times` the predicted one, holds the
    bounds; one where none does.
    """
    timing = timing_of(curve)
    full = min(most, 2 * (configuration.workers + 1) * configuration.batch_size)
    low, high = 1, full
    while low < high:
        middle = (low + high + 1) // 2
        one = _closed(timing, configuration, middle, overhead_ms, cores)
        if slo is None or slo.slack(latency_of(one, times)) <= 1:
            low = middle
        else:
            high = middle - 1
    if slo is None:  # more connections than keep all workers at work only wait
        low = min(full, (configuration.workers + 1) * configuration.batch_size)
    return low, _closed(timing, configuration, low, overhead_ms, cores)


def best_rate(
    curve: Curve,
    configuration: Configuration,
    slo: Slo | None,
    overhead_ms: float,
    cores: int,
    times: float = 1.0,
) -> tuple[float, Prediction]:
    """The same for an open loop: the greatest rate whose latency holds the bounds; without any,
    nine tenths of what is possible.
    """
    timing = timing_of(curve)
    most = capacity(timing, configuration, cores)
    if slo is None:
        return 0.9 * most, _open(timing, configuration, 0.9 * most, overhead_ms, cores)
    low, high = 0.0, 0.98
    for _ in range(6):
        middle = (low + high) / 2
        one = _open(timing, configuration, middle * most, overhead_ms, cores)
        low, high = (middle, high) if slo.slack(latency_of(one, times)) <= 1 else (low, middle)
    rate = float(f"{max(low, 0.05) * most:.3g}")
    return rate, _open(timing, configuration, rate, overhead_ms, cores)


def undisturbed(curve: Curve) -> Curve:
    """A batch takes no longer than a larger one: where it did, something else on the machine took
    its time.

    What a curve that was disturbed all along would have been without that is calculated as it is
    for a round.
    """
    factor = correction(curve)
    least, points = math.inf, []
    for point in sorted(curve.points, key=lambda point: -point.batch_size):
        alone = point.median_ms / factor
        if (
            factor > 1 and curve.threads and point.cpu_ms is not None
        ):  # it took its time of the processor in any case
            alone = min(point.median_ms, max(alone, point.cpu_ms / curve.threads))
        least = min(least, alone)
        points.append(
            point if point.median_ms == least else point.model_copy(update={"median_ms": least})
        )
    return curve.model_copy(update={"points": points[::-1]})
