"""The prediction of a configuration's throughput and latency from a worker's curve t(n)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import Curve, OfferedLoad, Prediction
from tsx_cli.bench.search.machine import correction
from tsx_runtime.core.models.latency_curve import LatencyCurve

OVERHEAD_MS = 0.3  # time of a request outside its worker, in the client and the front end
BETWEEN_MS = 0.1  # time from the end of a batch to the start of the next
# Fraction of a batch's time in which the GPU cannot serve another worker. It is a guess, which
# measurements correct.
GPU_SHARE = 0.7
P99_DEVIATIONS = 2.33  # standard deviations to the 99th percentile


class Timing(NamedTuple):
    """A latency curve, prepared for calculations."""

    sizes: tuple[int, ...]
    times: tuple[float, ...]  # milliseconds
    busy: float | None  # cores that one worker keeps busy; None if this was not measured
    spread: float

    def batch_ms(self, size: float) -> float:
        return 1000 * _curve(self.sizes, self.times).typical(size)


@lru_cache(maxsize=256)
def _curve(sizes: tuple[int, ...], times: tuple[float, ...]) -> LatencyCurve:
    """Return the curve as the type with which a server plans its batches."""
    return LatencyCurve(
        0.5, [(size, milliseconds / 1000) for size, milliseconds in zip(sizes, times, strict=True)]
    )


def timing_of(curve: Curve) -> Timing:
    """Prepare a curve for calculations.

    Raises:
        ValueError: The curve has no point.
    """
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
    """Return by how much other workers on the machine slow a batch down.

    At any time, `active` workers are busy.
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
    """Predict the throughput and the latency of a load.

    Raises:
        ValueError: The curve has no point.
    """
    timing = timing_of(curve)
    if offered.mode == "open":
        return _open(timing, configuration, offered.rate or 0.0, overhead_ms, cores)
    return _closed(timing, configuration, offered.connections, overhead_ms, cores)


def capacity(timing: Timing, configuration: Configuration, cores: int) -> float:
    """Return the requests per second of busy workers with full batches, which is the maximum."""
    size = configuration.batch_size
    max_rate = max(
        batch / timing.batch_ms(batch)
        for batch in {1, size, *(measured for measured in timing.sizes if measured <= size)}
    )
    return 1000 * configuration.workers * max_rate / slowdown(timing, configuration, cores)


def _closed(
    timing: Timing, configuration: Configuration, connections: int, overhead_ms: float, cores: int
) -> Prediction:
    """Predict a closed loop in its steady state: while a worker runs a batch, the next one gathers.

    The connections are spread over the batches that the workers run and one that waits. If more
    connections wait, batches are full. With fewer connections than workers, each batch has one
    request.
    """
    active = min(configuration.workers, connections)
    size = min(float(configuration.batch_size), max(1.0, connections / (configuration.workers + 1)))
    batch_ms = timing.batch_ms(size) * slowdown(timing, configuration, cores, active)
    # Requests per millisecond.
    rate = min(active * size / (batch_ms + BETWEEN_MS), connections / (batch_ms + overhead_ms))
    mean = connections / rate
    return Prediction(throughput=1000 * rate, p99_ms=mean * (1 + P99_DEVIATIONS * timing.spread))


def _open(
    timing: Timing, configuration: Configuration, rate: float, overhead_ms: float, cores: int
) -> Prediction:
    """Predict an open loop from its capacity: waiting times grow with use / (1 - use)."""
    max_rate = capacity(timing, configuration, cores)
    if rate >= max_rate:
        return Prediction(throughput=max_rate, p99_ms=math.inf)
    workers, max_batch_size, use = configuration.workers, configuration.batch_size, rate / max_rate
    batch_ms = timing.batch_ms(1 + use * (max_batch_size - 1)) * slowdown(
        timing, configuration, cores
    )
    batch_ms *= 1 + P99_DEVIATIONS * timing.spread
    wait_ms = P99_DEVIATIONS * batch_ms * use / (1 - use) / workers / max_batch_size
    running_ms = batch_ms if max_batch_size > 1 else 0.0  # A request may just miss a batch.
    return Prediction(throughput=rate, p99_ms=wait_ms + running_ms + batch_ms + overhead_ms)


def latency_of(prediction: Prediction, factor: float = 1.0) -> dict[str, float]:
    """Return a predicted latency by the names of bounds; most values are estimates from the p99."""
    p99 = prediction.p99_ms * factor
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
    factor: float = 1.0,
    max_connections: int = 1024,
) -> tuple[int, Prediction]:
    """Return the number of connections with the most throughput within the bounds.

    It is 1 if no number holds. The assumed latency is `factor` times the predicted latency.
    """
    timing = timing_of(curve)
    all_busy = min(max_connections, 2 * (configuration.workers + 1) * configuration.batch_size)
    low, high = 1, all_busy
    while low < high:
        middle = (low + high + 1) // 2
        prediction = _closed(timing, configuration, middle, overhead_ms, cores)
        if slo is None or slo.latency_ratio(latency_of(prediction, factor)) <= 1:
            low = middle
        else:
            high = middle - 1
    if slo is None:  # More connections than keep all workers busy would only wait.
        low = min(all_busy, (configuration.workers + 1) * configuration.batch_size)
    return low, _closed(timing, configuration, low, overhead_ms, cores)


def best_rate(
    curve: Curve,
    configuration: Configuration,
    slo: Slo | None,
    overhead_ms: float,
    cores: int,
    factor: float = 1.0,
) -> tuple[float, Prediction]:
    """Return the highest rate of an open loop within the bounds.

    If there are no bounds, it is 90 % of the capacity.
    """
    timing = timing_of(curve)
    max_rate = capacity(timing, configuration, cores)
    if slo is None:
        return 0.9 * max_rate, _open(timing, configuration, 0.9 * max_rate, overhead_ms, cores)
    low, high = 0.0, 0.98
    for _ in range(6):
        middle = (low + high) / 2
        prediction = _open(timing, configuration, middle * max_rate, overhead_ms, cores)
        holds = slo.latency_ratio(latency_of(prediction, factor)) <= 1
        low, high = (middle, high) if holds else (low, middle)
    rate = float(f"{max(low, 0.05) * max_rate:.3g}")
    return rate, _open(timing, configuration, rate, overhead_ms, cores)


def undisturbed(curve: Curve) -> Curve:
    """Return a curve in which no batch takes longer than a larger one.

    Longer times are due to other activity on the machine. A disturbed curve is corrected like a
    disturbed round.
    """
    factor = correction(curve)
    shortest_ms, points = math.inf, []
    for point in sorted(curve.points, key=lambda point: -point.batch_size):
        single_ms = point.median_ms / factor
        # A batch cannot be shorter than its processor time.
        if factor > 1 and curve.threads and point.cpu_ms is not None:
            single_ms = min(point.median_ms, max(single_ms, point.cpu_ms / curve.threads))
        shortest_ms = min(shortest_ms, single_ms)
        points.append(
            point
            if point.median_ms == shortest_ms
            else point.model_copy(update={"median_ms": shortest_ms})
        )
    return curve.model_copy(update={"points": points[::-1]})
