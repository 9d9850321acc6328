"""The batch engine on this machine.

It runs the model's workers, as a server would start them, and keeps enough rows in flight to
keep them busy.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import psutil
from anyio.from_thread import BlockingPortal, start_blocking_portal

from tsx_cli.batch.rows import Row, RowResult
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.report.archive_record import read_record
from tsx_cli.common.client import error_text
from tsx_cli.common.failure import CliError
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.standalone import open_model
from tsx_runtime.core.scheduling.job import Answer, WaitingJob
from tsx_runtime.errors import TsxError, Unavailable
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.content_types import looks_like
from tsx_runtime.shared.cores import cpu_count
from tsx_runtime.wire import content_type_of, header_block

QUICK_FLIGHT_ROWS = 64  # the largest flight of quick rows
MIN_FLIGHT_S, MAX_FLIGHT_S = 0.02, 1.0  # Flights outside this range grow or shrink.
MAX_IN_FLIGHT_BYTES = 256 << 20  # size of the rows and their responses
MAX_BATCH_SIZE = 4096
MAX_BATCH_S = 5.0  # A kill loses the batch in progress, so batches stay short.
MIN_SPEEDUP = 1.05  # A smaller gain does not justify the memory of a larger batch.
MIN_MEASUREMENT_S = 0.25
MAX_MEMORY_PERCENT = 85.0
OOM_METRIC = (
    "tsx_oom_retries_total"  # counts batches that a worker split after running out of memory
)


class Recommendation(NamedTuple):
    """The values that the archive's benchmark record recommends for this machine, if any."""

    workers: int | None = None
    batch_size: int | None = None


def recommendation(model: Path) -> Recommendation:
    """Return what the archive's benchmark record recommends.

    The workers are those of the best configuration. The batch size is the one at which a single
    worker had the most rows per second.
    """
    record = read_record(model)
    if record is None or not record.here:
        return Recommendation()
    best = Configuration(**record.best.configuration)
    curves = [curve for curve in record.curves if curve.variant.kind == best.variant.kind]
    threads = best.threads_per_worker(record.environment.cores)
    points = [
        point
        for curve in [curve for curve in curves if curve.threads == threads] or curves
        for point in curve.points
    ]
    sizes = {
        point.batch_size: point.batch_size / point.median_ms
        for point in points
        if point.median_ms > 0
    }
    return Recommendation(
        best.workers, max(sizes, key=sizes.__getitem__) if sizes else best.batch_size
    )


@contextmanager
def open_local(
    model: Path, settings: Settings, workers: int | None = None, batch_size: int | None = None
) -> Iterator[LocalEngine]:
    """Open the engine on this machine; errors of `open_model` pass through.

    `workers` and `batch_size` override the recommendation of the benchmark record and the capacity
    of the machine.
    """
    recommended = recommendation(model)
    with (
        start_blocking_portal(name="model") as portal,
        portal.wrap_async_context_manager(open_model(model, settings, workers=0)) as version,
    ):
        _check_strategy(version)
        count = workers or recommended.workers or 1
        portal.call(version.scale, count, count)
        if not (workers or recommended.workers):
            count = _count_workers(version)
            portal.call(version.scale, count, count)
        # The engine limits the rows in flight itself.
        portal.call(version.change, {"job_queue_size": 1 << 30, "max_queue_bytes": 1 << 50})
        yield LocalEngine(portal, version, count, batch_size or recommended.batch_size)


def _check_strategy(version: ModelVersion) -> None:
    strategy = version.plan.strategy
    if strategy.sequences is not None or strategy.uses_job_tickets:
        reason = (
            "its requests belong to sequences (sequenceBatching)"
            if strategy.sequences is not None
            else "no request waits (useJobTicket)"
        )
        raise CliError(
            f"{version.label} cannot answer rows: {reason}; change its model-config.yaml"
        )


def _count_workers(version: ModelVersion) -> int:
    """Return the number of workers.

    It is the archive's setting, one per GPU, or as many as cores and memory allow. One worker must
    run already, because its memory is measured.
    """
    plan = version.plan
    if version.config.min_workers or plan.gpus or plan.parallel.is_group:
        return version.config.min_workers or max(1, len(plan.gpus) // max(1, plan.parallel.gpus))
    worker_pid = version.workers[0].pid
    worker_bytes = psutil.Process(worker_pid).memory_info().rss if worker_pid is not None else 0
    free_bytes = psutil.virtual_memory().available * MAX_MEMORY_PERCENT / 100
    return max(
        1, min(cpu_count() // (plan.threads or 1), 1 + int(free_bytes // max(worker_bytes, 1)))
    )


class LocalEngine:
    """A `BatchEngine` on this machine.

    Calibration finds the batch size with the first rows: it is doubled as long as the throughput
    grows.
    """

    def __init__(
        self, portal: BlockingPortal, version: ModelVersion, workers: int, batch_size: int | None
    ) -> None:
        self.workers = workers
        # In other modes, a worker accepts rows while it computes others.
        self.is_batching = version.plan.strategy.mode == "batch"
        self.batch_size: int | None = None  # None until it is known
        self._portal, self.version = portal, version
        if not self.is_batching:
            self.batch_size = QUICK_FLIGHT_ROWS
        elif batch_size is not None:
            self._set_batch_size(batch_size)

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        """Send rows to the workers in flights of one or more batches, and yield the results."""
        if self.batch_size is None:
            yield from self.calibrate(rows)
        assert self.batch_size is not None
        min_rows = self.batch_size if self.is_batching else 1
        size, flights = min_rows, deque[RowFlight]()
        answer_bytes, end_time, has_more = 0, time.monotonic(), True
        while True:
            while has_more and (count := sum(flight.rows for flight in flights)) < 2 * (
                size + self.workers * self.batch_size
            ):
                if (
                    flights
                    and sum(flight.size for flight in flights) + count * answer_bytes
                    > MAX_IN_FLIGHT_BYTES
                ):
                    break
                if has_more := bool(flight_rows := _take(rows, size)):
                    flights.append(self._submit(flight_rows))
            if not flights:
                return
            results = flights[0].results.result()
            flights.popleft()
            answer_bytes = sum(len(result.body) for result in results) // len(results)
            last_end, end_time = end_time, time.monotonic()
            if end_time - last_end < MIN_FLIGHT_S and size < QUICK_FLIGHT_ROWS:
                size *= 2
            elif end_time - last_end > MAX_FLIGHT_S:
                size = max(min_rows, size // 2)
            yield from results

    def calibrate(self, rows: Iterator[Row]) -> Iterator[RowResult]:
        """Find the batch size with the first rows, and yield their results."""
        size, best = 1, 0.0
        while True:
            self._set_batch_size(size)
            count, results, start, measured_rows, has_more = (
                size * self.workers,
                list[RowResult](),
                0.0,
                0,
                True,
            )
            while has_more and (
                measured_rows < 2 * count or time.monotonic() - start < MIN_MEASUREMENT_S
            ):
                flight_rows = _take(rows, count)
                results += self._submit(flight_rows).results.result()
                # The first iteration is the warm-up: `start` is still 0.
                has_more, measured_rows = (
                    len(flight_rows) == count,
                    measured_rows + count if start else 0,
                )
                start = start or time.monotonic()
            # If there are no rows left, the elapsed time may be zero.
            rate = measured_rows / max(time.monotonic() - start, 1e-9)
            yield from results
            if not has_more or rate < best * MIN_SPEEDUP:
                self._set_batch_size(max(1, size // 2))
                return
            if size == MAX_BATCH_SIZE or count / rate > MAX_BATCH_S or self._is_memory_full():
                return
            best, size = rate, size * 2

    def _is_memory_full(self) -> bool:
        has_run_out = any(key[0] == OOM_METRIC for key in list(self.version.stats.handler_metrics))
        return has_run_out or psutil.virtual_memory().percent > MAX_MEMORY_PERCENT

    def _set_batch_size(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._portal.call(self.version.change, {"batch_size": batch_size})

    def _submit(self, rows: Sequence[Row]) -> RowFlight:
        return RowFlight(
            len(rows),
            sum(len(row.body) for row in rows),
            self._portal.start_task_soon(self._compute, rows),
        )

    async def _compute(self, rows: Sequence[Row]) -> list[RowResult]:
        """Return the results in the order of the rows.

        Raises:
            Unavailable: The model has no workers left.
        """
        now, max_bytes, jobs = time.monotonic(), self.version.max_response_size, list[WaitingJob]()
        for row in rows:
            if row.error is None:
                jobs.append(
                    WaitingJob(
                        b"%d\r\n\r\n%b" % (row.index, _headers(row.content_type)), row.body, now
                    )
                )
                self.version.submit(jobs[-1])
        answers = iter(
            await asyncio.gather(*(job.read_all(max_bytes) for job in jobs), return_exceptions=True)
        )
        return [
            _result(row, next(answers)) if row.error is None else row.failed(400, row.error)
            for row in rows
        ]


class RowFlight(NamedTuple):
    """Rows that were submitted to the workers together."""

    rows: int
    size: int  # bytes
    results: Future[list[RowResult]]


def _take(rows: Iterator[Row], count: int) -> list[Row]:
    """Take `count` rows, or fewer if the rows are large or come to an end."""
    flight_rows, size = list[Row](), 0
    for row in rows:
        flight_rows.append(row)
        size += len(row.body)
        if len(flight_rows) == count or size > MAX_IN_FLIGHT_BYTES // 8:
            break
    return flight_rows


def _result(row: Row, answer: Answer | BaseException) -> RowResult:
    if isinstance(answer, TsxError) and not isinstance(answer, Unavailable):
        return row.failed(answer.status, answer.message)
    if isinstance(answer, BaseException):
        raise answer
    content_type = content_type_of(answer.headers) or looks_like(answer.body)
    error = error_text(answer.body) if answer.status >= 400 else None
    return RowResult(row.index, row.id, answer.status, content_type, answer.body, error)


@lru_cache(256)
def _headers(content_type: str) -> bytes:
    return header_block([(b"content-type", content_type.encode())])
