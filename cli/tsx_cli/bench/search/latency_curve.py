"""The latency curve t(n): one worker's time for a batch of n requests, without a server.

A curve belongs to a device, precision, compilation, form and threads. Batches of each size are
repeated until they do not get quicker any more, which is the warm-up. They go on until the median
is precise or the size's share of the time is used up. Sizes come in their order, so that a lack of
memory ends only the curve.
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
MIN_CHUNKS_PER_SIZE = 6  # chunks that fit into a size's time
ALWAYS_MEASURED_S = 0.5  # Shorter measurements run even if the time is over.
MIN_CHUNK_BATCHES = 2
MIN_SAMPLES = 3  # batches of a point
WARM_RATIO = 0.95  # ratio to the median of the chunk before; below it, the warm-up goes on
MAX_WARM_UP_CHUNKS = 10
MAX_BUDGET_FACTOR = 1.5  # a curve's time with repetitions, in multiples of its budget
MIN_RELATIVE_RATE = 0.6  # ratio to a smaller batch's throughput; below it, a size was disturbed
MEDIAN_PRECISION = 0.02  # half-width of the median's interval, as a share


class BatchTiming(NamedTuple):
    """The times of one batch, in seconds; NaN for a step that the handler does not have."""

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
    """Measure the curve of a variant, whose workers and batch size do not count.

    `budget_seconds` are for all sizes, without loading; half as many again are for sizes with
    implausible times. The curve ends with the size whose batch takes more than `most_ms`. A
    failure becomes `failed` of the curve.
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
                doubtful := implausible(curve.points)
            ) and time.monotonic() < started_at + MAX_BUDGET_FACTOR * budget_seconds:
                for position in doubtful:
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
    """Return the positions of the sizes that something else must have slowed down.

    A batch of such a size takes longer than a larger one, by more than both vary, or has far less
    throughput than a smaller one. The points are in order.
    """
    positions = []
    for position, point in enumerate(points):
        longer = any(point.low_ms > larger.high_ms for larger in points[position + 1 :])
        rate = point.batch_size / point.median_ms
        if longer or any(
            rate < MIN_RELATIVE_RATE * smaller.batch_size / smaller.median_ms
            for smaller in points[:position]
        ):
            positions.append(position)
    return positions


def _check(worker: StandaloneWorker, variant: Configuration) -> None:
    """Check that the worker is of the variant, as others would have wrong figures.

    Raises:
        WorkerFailed: It computes in another precision, form or device.
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
    """Yield each point with the coefficient of variation of its times.

    Sizes without remaining time are left out.
    """
    ends = time.monotonic() + seconds
    needed = 0.0
    for position, size in enumerate(sizes):
        remaining_s = ends - time.monotonic()
        if remaining_s <= 0 and needed > ALWAYS_MEASURED_S:
            return
        first = measure_chunk(worker, items, size, 0, 0.0)
        # Work that is done once, such as compiling, takes no time from the other sizes.
        ends += max(0.0, first[0].seconds - first[1].seconds)
        share = max(0.0, ends - time.monotonic()) / (len(sizes) - position)
        point, spread = _point(worker, items, size, share, first)
        needed = (MIN_CHUNK_BATCHES + MIN_SAMPLES + 1) * point.median_ms / 1000 * 2
        yield point, spread


def _point(
    worker: StandaloneWorker,
    items: Sequence[Item],
    size: int,
    seconds: float,
    first: list[BatchTiming],
) -> tuple[CurvePoint, float]:
    """Measure one size; the `first` batches have run already.

    Raises:
        WorkerFailed: The worker failed.
    """
    ends, chunk_seconds = time.monotonic() + seconds, min(CHUNK_S, seconds / MIN_CHUNKS_PER_SIZE)
    chunks = [first]
    while not is_settled([[sample.seconds for sample in chunk] for chunk in chunks]):
        if len(chunks) == MAX_WARM_UP_CHUNKS or time.monotonic() > ends - seconds / 2:
            break
        chunks.append(measure_chunk(worker, items, size, len(chunks), chunk_seconds))
    used, started_at = worker.cpu_seconds(), time.monotonic()
    samples = [*(chunks[-1] if len(chunks) > 1 else ())]
    fresh = 0
    while fresh < MIN_SAMPLES or (
        time.monotonic() < ends and not is_precise([sample.seconds for sample in samples])
    ):
        chunk = measure_chunk(worker, items, size, len(chunks) + fresh, chunk_seconds)
        samples += chunk
        fresh += len(chunk)
    cpu = worker.cpu_seconds() - used if time.monotonic() - started_at > CHUNK_S / 2 else None
    return point_of(size, samples, None if cpu is None else cpu / fresh), spread_of(
        [sample.seconds for sample in samples]
    )


def measure_chunk(
    worker: StandaloneWorker, items: Sequence[Item], size: int, first: int, seconds: float
) -> list[BatchTiming]:
    """Run batches for so long, but at least a few; `first` is the number of the first.

    Raises:
        WorkerFailed: A batch is refused.
    """
    samples: list[BatchTiming] = []
    ends = time.monotonic() + seconds
    while len(samples) < MIN_CHUNK_BATCHES or time.monotonic() < ends:
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

    Its interval is the half-width of a box plot's notch, 1.57 quartile distances / sqrt(n).
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
    """Return the coefficient of variation without outliers, such as a pause of the machine."""
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
