"""The latency curve t(n): one worker's time for a batch of n requests, by device, precision,
compilation, form and threads, without server.

Of each size, batches are repeated until they do not get quicker any more, which is the warm-up, and
then until the median is known well enough or the size's share of the time is used up. Sizes come in
their order, so that what fails for memory ends the curve and nothing else.
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

CHUNK = 0.2  # seconds of batches between two looks at them, at most
CHUNKS_OF_SHARE = 6  # that the time for a size has room for, at least
LONG = 0.5  # seconds: what takes no more is measured even when the time is over
FEWEST = 2  # batches of a chunk, however long they take
LEAST = 3  # batches that a point is made of
QUICKER = 0.95  # times the median of the chunk before: less, and it is still warming up
CHUNKS = 10  # of warm-up at most
AGAIN = 1.5  # times its budget: the most that a curve takes with what is measured again
FALL = 0.6  # of the throughput of a smaller batch: a larger one that does less was disturbed
PRECISE = 0.02  # of the median, that it is known by


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
    """`budget_seconds` are for all sizes, without loading; half as many again are for sizes whose
    times are implausible.

    It ends with the size whose batch takes more than `most_ms`. Of `variant`, workers and batch
    size do not count. `failed` says what failed.
    """
    curve = Curve(**variant.variant._asdict())
    try:
        with start_worker(worker_spec(archive, variant, max(batch_sizes))) as worker:
            _check(worker, variant)
            spreads: dict[int, float] = {}
            items, begun = items_of(payloads), time.monotonic()
            for point, spread in _points(worker, items, sorted(set(batch_sizes)), budget_seconds):
                curve.points.append(point)
                spreads[point.batch_size] = spread
                curve.spread = statistics.median(spreads.values())
                if point.median_ms > most_ms:
                    break
            while (
                doubtful := implausible(curve.points)
            ) and time.monotonic() < begun + AGAIN * budget_seconds:
                for position in doubtful:
                    size, before = curve.points[position].batch_size, curve.points[position]
                    point, spread = _point(
                        worker,
                        items,
                        size,
                        budget_seconds / len(batch_sizes),
                        chunk_of(worker, items, size, 0, 0.0),
                    )
                    if point.median_ms < before.median_ms:
                        curve.points[position], spreads[size] = point, spread
                curve.spread = statistics.median(spreads.values())
    except WorkerFailed as error:
        curve.failed = str(error)
    return curve


def implausible(points: Sequence[CurvePoint]) -> list[int]:
    """Positions of the sizes, which are in order, that something else must have slowed down: a
    batch takes longer than a larger one, by more than both vary, or it does far less for its time
    than a smaller one.
    """
    found = []
    for position, point in enumerate(points):
        longer = any(point.low_ms > larger.high_ms for larger in points[position + 1 :])
        rate = point.batch_size / point.median_ms
        if longer or any(
            rate < FALL * smaller.batch_size / smaller.median_ms for smaller in points[:position]
        ):
            found.append(position)
    return found


def _check(worker: StandaloneWorker, variant: Configuration) -> None:
    """Whether the worker is what it should be: the figures of another would be taken for its
    own.
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
    """Each with the coefficient of variation of its times.

    Sizes for which there is no time left are left out.
    """
    ends = time.monotonic() + seconds
    needed = 0.0
    for position, size in enumerate(sizes):
        left = ends - time.monotonic()
        if left <= 0 and needed > LONG:
            return
        first = chunk_of(worker, items, size, 0, 0.0)
        ends += max(
            0.0, first[0].seconds - first[1].seconds
        )  # what is done once, such as compiling, takes no time from the others
        share = max(0.0, ends - time.monotonic()) / (len(sizes) - position)
        point, spread = _point(worker, items, size, share, first)
        needed = (FEWEST + LEAST + 1) * point.median_ms / 1000 * 2
        yield point, spread


def _point(
    worker: StandaloneWorker,
    items: Sequence[Item],
    size: int,
    seconds: float,
    first: list[BatchTiming],
) -> tuple[CurvePoint, float]:
    """`first` are batches that ran already. Raises WorkerFailed."""
    ends, chunk_seconds = time.monotonic() + seconds, min(CHUNK, seconds / CHUNKS_OF_SHARE)
    chunks = [first]
    while not settled([[sample.seconds for sample in chunk] for chunk in chunks]):
        if len(chunks) == CHUNKS or time.monotonic() > ends - seconds / 2:
            break
        chunks.append(chunk_of(worker, items, size, len(chunks), chunk_seconds))
    used, begun = worker.cpu_seconds(), time.monotonic()
    samples = [*(chunks[-1] if len(chunks) > 1 else ())]
    fresh = 0
    while fresh < LEAST or (
        time.monotonic() < ends and not precise([sample.seconds for sample in samples])
    ):
        chunk = chunk_of(worker, items, size, len(chunks) + fresh, chunk_seconds)
        samples += chunk
        fresh += len(chunk)
    cpu = worker.cpu_seconds() - used if time.monotonic() - begun > CHUNK / 2 else None
    return point_of(size, samples, None if cpu is None else cpu / fresh), spread_of(
        [sample.seconds for sample in samples]
    )


def chunk_of(
    worker: StandaloneWorker, items: Sequence[Item], size: int, first: int, seconds: float
) -> list[BatchTiming]:
    """Batches for so long, but a few at least; `first` is the number of the first. Raises
    WorkerFailed where one is refused.
    """
    samples: list[BatchTiming] = []
    ends = time.monotonic() + seconds
    while len(samples) < FEWEST or time.monotonic() < ends:
        reply = worker.answer(batch_of(items, size, first + len(samples)))
        refused = next((each for each in reply.answers if each.status >= 400), None)
        if refused is not None:
            raise WorkerFailed(
                f"a batch of {size} was answered {refused.status}: {error_text(refused.body)}"
            )
        samples.append(BatchTiming(reply.seconds, reply.stages))
    return samples


def settled(chunks: Sequence[Sequence[float]]) -> bool:
    """Whether batches have stopped getting quicker: the last chunk is about as slow as the one
    before.
    """
    return len(chunks) > 1 and statistics.median(chunks[-1]) >= QUICKER * statistics.median(
        chunks[-2]
    )


def precise(seconds: Sequence[float]) -> bool:
    """Whether the median is known well enough: by the usual half-width of a box plot's notch, 1.57
    quartile distances / sqrt(n).
    """
    if len(seconds) < LEAST:
        return False
    low, middle, high = quartiles(seconds)
    return 1.57 * (high - low) / math.sqrt(len(seconds)) <= PRECISE * middle


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread_of(seconds: Sequence[float]) -> float:
    """The coefficient of variation, without what is more than three times off: a pause of the
    machine's is not the model's.
    """
    middle = statistics.median(seconds)
    near = [value for value in seconds if middle / 3 <= value <= 3 * middle]
    return statistics.stdev(near) / statistics.fmean(near) if len(near) > 1 else 0.0


def point_of(size: int, samples: Sequence[BatchTiming], cpu_seconds: float | None) -> CurvePoint:
    low, middle, high = (
        1000 * value for value in quartiles([sample.seconds for sample in samples])
    )
    stages: list[float | None] = []
    for stage in range(3):
        known = [sample.stages[stage] for sample in samples if not math.isnan(sample.stages[stage])]
        stages.append(1000 * statistics.median(known) if known else None)
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
