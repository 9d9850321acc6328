"""The latency curve t(n): one worker's time for a batch of n requests, measured without a server.

A curve belongs to a device, a precision, a compilation, a form and a number of threads. Batches of
each size are repeated until they stop getting quicker, which is the warm-up. Then they are measured
until the median is precise, or the time for this size is used up. Sizes are measured in ascending
order, so that a lack of memory only ends the curve.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tsx_archiver import OpenArchive
from tsx_archiver.metadata.forms import REFERENCE
from tsx_cli.bench.load.configuration import AS_IS, Configuration
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.results import Curve, CurvePoint
from tsx_cli.bench.search.worker import (
    StandaloneWorker,
    WorkerFailed,
    batch_of,
    items_of,
    start_worker,
    worker_spec,
)
from tsx_cli.common.client import error_text
from tsx_runtime.wire import Item

CHUNK_S = 0.2  # longest series of batches between two checks
MIN_CHUNKS_PER_SIZE = 6  # chunks in the time for one size
ALWAYS_MEASURED_S = 0.5  # Sizes that take less time than this are measured in any case.
MIN_CHUNK_BATCHES = 2
MIN_SAMPLES = 3  # batches per point
WARM_RATIO = 0.95  # ratio to the previous chunk's median; the warm-up ends above it
MAX_WARM_UP_CHUNKS = 10
MAX_BUDGET_FACTOR = 1.5  # time of a curve with repetitions, in multiples of its budget
MIN_RELATIVE_RATE = 0.6  # ratio to the throughput of smaller batches; a disturbed size is below
MEDIAN_PRECISION = 0.02  # half-width of the median's interval, as a fraction of the median


class BatchTiming(NamedTuple):
    """The times of one batch, in seconds; the time of a step that the handler lacks is NaN."""

    seconds: float
    stages: tuple[float, float, float]


def measure_curve(
    archive: OpenArchive,
    variant: Configuration,
    batch_sizes: Sequence[int],
    payloads: Sequence[Payload],
    *,
    budget_seconds: float,
    most_ms: float = math.inf,
) -> Curve:
    """Measure the curve of a variant; the workers and batch size of the configuration are ignored.

    `budget_seconds` is the time for all sizes, without loading. Half of it is added for repeating
    sizes with implausible times. The curve ends with the first size whose batch takes more than
    `most_ms`. A failure becomes `failed` of the curve.
    """
    curve = Curve(**variant.variant._asdict())
    try:
        with start_worker(worker_spec(archive, variant, max(batch_sizes))) as worker:
            _check(worker, variant)
            spreads: dict[int, float] = {}
            items, started_at = items_of(payloads), time.monotonic()
            for point, spread in _points(worker, items, sorted(set(batch_sizes)), budget_seconds):
                curve.points.append(point)
                spreads[point.batch_size] = spread
                curve.spread = statistics.median(spreads.values())
                if point.median_ms > most_ms:
                    break
            while (
                implausible_positions := implausible(curve.points)
            ) and time.monotonic() < started_at + MAX_BUDGET_FACTOR * budget_seconds:
                for position in implausible_positions:
                    size, old_point = curve.points[position].batch_size, curve.points[position]
                    point, spread = _point(
                        worker,
                        items,
                        size,
                        budget_seconds / len(batch_sizes),
                        measure_chunk(worker, items, size, 0, 0.0),
                    )
                    if point.median_ms < old_point.median_ms:
                        curve.points[position], spreads[size] = point, spread
                curve.spread = statistics.median(spreads.values())
    except WorkerFailed as error:
        curve.failed = str(error)
    return curve


def implausible(points: Sequence[CurvePoint]) -> list[int]:
    """Return the positions of sizes that something else must have slowed down.

    A batch of such a size takes longer than a larger one, beyond the variation of both, or has far
    less throughput than a smaller one. The points are sorted by size.
    """
    positions = []
    for position, point in enumerate(points):
        is_longer = any(point.low_ms > larger.high_ms for larger in points[position + 1 :])
        rate = point.batch_size / point.median_ms
        if is_longer or any(
            rate < MIN_RELATIVE_RATE * smaller.batch_size / smaller.median_ms
            for smaller in points[:position]
        ):
            positions.append(position)
    return positions


def _check(worker: StandaloneWorker, variant: Configuration) -> None:
    """Check that the worker runs the variant, since others would have wrong figures.

    Raises:
        WorkerFailed: The worker computes in another precision, form or device.
    """
    if variant.precision not in (AS_IS, worker.precision):
        problem = "its handler ignores `precision`: see docs/guides/handlers.md"
        raise WorkerFailed(
            problem
            if worker.precision is None
            else f"its handler computes in {worker.precision} instead"
        )
    if variant.form not in (None, REFERENCE, worker.form):
        ignored = "its handler ignores `forms`: see docs/guides/handlers.md"
        raise WorkerFailed("; ".join(worker.forms_passed_over) or ignored)
    if worker.device.partition(":")[0] != variant.device:
        raise WorkerFailed(f"its handler runs on {worker.device}, not on {variant.device}")


def _points(
    worker: StandaloneWorker, items: Sequence[Item], sizes: Sequence[int], seconds: float
) -> Iterator[tuple[CurvePoint, float]]:
    """Yield each point, and the coefficient of variation of its times.

    Sizes for which no time remains are left out.
    """
    deadline = time.monotonic() + seconds
    next_size_s = 0.0
    for position, size in enumerate(sizes):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 and next_size_s > ALWAYS_MEASURED_S:
            return
        first_chunk = measure_chunk(worker, items, size, 0, 0.0)
        # Only the first batch compiles, for example. That time is not taken from the other sizes.
        deadline += max(0.0, first_chunk[0].seconds - first_chunk[1].seconds)
        size_s = max(0.0, deadline - time.monotonic()) / (len(sizes) - position)
        point, spread = _point(worker, items, size, size_s, first_chunk)
        next_size_s = (MIN_CHUNK_BATCHES + MIN_SAMPLES + 1) * point.median_ms / 1000 * 2
        yield point, spread


def _point(
    worker: StandaloneWorker,
    items: Sequence[Item],
    size: int,
    seconds: float,
    first_chunk: list[BatchTiming],
) -> tuple[CurvePoint, float]:
    """Measure one size; the batches of `first_chunk` have already run.

    Raises:
        WorkerFailed: The worker failed.
    """
    deadline, chunk_seconds = (
        time.monotonic() + seconds,
        min(CHUNK_S, seconds / MIN_CHUNKS_PER_SIZE),
    )
    chunks = [first_chunk]
    while not is_settled([[sample.seconds for sample in chunk] for chunk in chunks]):
        if len(chunks) == MAX_WARM_UP_CHUNKS or time.monotonic() > deadline - seconds / 2:
            break
        chunks.append(measure_chunk(worker, items, size, len(chunks), chunk_seconds))
    cpu_start_s, started_at = worker.cpu_seconds(), time.monotonic()
    samples = [*(chunks[-1] if len(chunks) > 1 else ())]
    measured_batches = 0
    while measured_batches < MIN_SAMPLES or (
        time.monotonic() < deadline and not is_precise([sample.seconds for sample in samples])
    ):
        chunk = measure_chunk(worker, items, size, len(chunks) + measured_batches, chunk_seconds)
        samples += chunk
        measured_batches += len(chunk)
    cpu = (
        worker.cpu_seconds() - cpu_start_s if time.monotonic() - started_at > CHUNK_S / 2 else None
    )
    return point_of(size, samples, None if cpu is None else cpu / measured_batches), spread_of(
        [sample.seconds for sample in samples]
    )


def measure_chunk(
    worker: StandaloneWorker, items: Sequence[Item], size: int, first: int, seconds: float
) -> list[BatchTiming]:
    """Run batches for some seconds, but at least a few; `first` is the number of the first batch.

    Raises:
        WorkerFailed: The handler refuses a batch.
    """
    samples: list[BatchTiming] = []
    deadline = time.monotonic() + seconds
    while len(samples) < MIN_CHUNK_BATCHES or time.monotonic() < deadline:
        reply = worker.answer(batch_of(items, size, first + len(samples)))
        refusal = next((answer for answer in reply.answers if answer.status >= 400), None)
        if refusal is not None:
            raise WorkerFailed(
                f"a batch of {size} was answered {refusal.status}: {error_text(refusal.body)}"
            )
        samples.append(BatchTiming(reply.seconds, reply.stages))
    return samples


def is_settled(chunks: Sequence[Sequence[float]]) -> bool:
    """Tell whether batches have stopped getting quicker, chunk by chunk."""
    return len(chunks) > 1 and statistics.median(chunks[-1]) >= WARM_RATIO * statistics.median(
        chunks[-2]
    )


def is_precise(seconds: Sequence[float]) -> bool:
    """Tell whether the median is precise enough.

    The half-width of its interval is 1.57 * (q3 - q1) / sqrt(n), as for the notch of a box plot.
    """
    if len(seconds) < MIN_SAMPLES:
        return False
    low, middle, high = quartiles(seconds)
    return 1.57 * (high - low) / math.sqrt(len(seconds)) <= MEDIAN_PRECISION * middle


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread_of(seconds: Sequence[float]) -> float:
    """Return the coefficient of variation without outliers, such as pauses of the machine."""
    middle = statistics.median(seconds)
    near = [value for value in seconds if middle / 3 <= value <= 3 * middle]
    return statistics.stdev(near) / statistics.fmean(near) if len(near) > 1 else 0.0


def point_of(size: int, samples: Sequence[BatchTiming], cpu_seconds: float | None) -> CurvePoint:
    low, middle, high = (
        1000 * value for value in quartiles([sample.seconds for sample in samples])
    )
    stages: list[float | None] = []
    for stage in range(3):
        stage_times = [
            sample.stages[stage] for sample in samples if not math.isnan(sample.stages[stage])
        ]
        stages.append(1000 * statistics.median(stage_times) if stage_times else None)
    return CurvePoint(
        batch_size=size,
        median_ms=middle,
        low_ms=low,
        high_ms=high,
        samples=len(samples),
        cpu_ms=None if cpu_seconds is None else 1000 * cpu_seconds,
        preprocess_ms=stages[0],
        inference_ms=stages[1],
        postprocess_ms=stages[2],
    )
