"""The engine on this machine: the model's own workers, as a server would start them, with as many
rows in hand as keep them busy.
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
from tsx_runtime.core.registry.registry import open_model
from tsx_runtime.core.scheduling.job import Answer, WaitingJob
from tsx_runtime.errors import TsxError, Unavailable
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.content_types import looks_like
from tsx_runtime.shared.cores import cpu_count
from tsx_runtime.wire import content_type_of, header_block

CHUNK = 64  # rows that go to the workers together, where they are fast
QUICK, SLOW = 0.02, 1.0  # seconds of such rows, between which their number stays
IN_HAND = 256 << 20  # bytes of rows and answers that are under way
LARGEST = 4096  # batch size that calibration tries
# seconds of a batch, beyond which it does not grow: one that is under way is computed again after a
# kill
LONGEST = 5.0
GROWTH = 1.05  # in rows per second, for which a larger batch is worth its memory
STEP = 0.25  # seconds at least that a batch size is measured for
FULL = 85.0  # per cent of the memory in use, beyond which nothing grows
OUT_OF_MEMORY = "tsx_oom_retries_total"  # what a worker counts that has cut a batch


class Recommendation(NamedTuple):
    """What the archive's measurement recommends; None where it says nothing of this machine."""

    workers: int | None = None
    batch_size: int | None = None


def recommendation(model: Path) -> Recommendation:
    """The number of workers of the measured winner, and the batch size with which one of them had
    the most rows per second.
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
    """`workers` and `batch_size`: instead of what the measurement recommends or the machine has
    room for. Raises as `open_model` does.
    """
    measured = recommendation(model)
    with (
        start_blocking_portal(name="model") as portal,
        portal.wrap_async_context_manager(open_model(model, settings, workers=0)) as version,
    ):
        _check(version)
        count = workers or measured.workers or 1
        portal.call(version.scale, count, count)
        if not (workers or measured.workers):
            count = _room_for(version)
            portal.call(version.scale, count, count)
        portal.call(
            version.change, {"job_queue_size": 1 << 30, "max_queue_bytes": 1 << 50}
        )  # the engine bounds what is under way
        yield LocalEngine(portal, version, count, batch_size or measured.batch_size)


def _check(version: ModelVersion) -> None:
    strategy = version.plan.strategy
    if strategy.sequences is not None or strategy.tickets:
        what = (
            "its requests belong to sequences (sequenceBatching)"
            if strategy.sequences is not None
            else "no request waits (useJobTicket)"
        )
        raise CliError(f"{version.label} cannot answer rows: {what}; change its model-config.yaml")


def _room_for(version: ModelVersion) -> int:
    """As many workers as the archive says, or there are GPUs, or as cores and memory allow; one is
    there.
    """
    plan = version.plan
    if version.config.min_workers or plan.gpus or plan.parallel.is_group:
        return version.config.min_workers or max(1, len(plan.gpus) // max(1, plan.parallel.gpus))
    first = version.workers[0].pid
    size = psutil.Process(first).memory_info().rss if first is not None else 0
    free = psutil.virtual_memory().available * FULL / 100
    return max(1, min(cpu_count() // (plan.threads or 1), 1 + int(free // max(size, 1))))


class LocalEngine:
    """See `BatchEngine`.

    Without a batch size it is found on the first rows: doubled for as long as the rows per second
    grow.
    """

    def __init__(
        self, portal: BlockingPortal, version: ModelVersion, workers: int, batch_size: int | None
    ) -> None:
        self.workers = workers
        self.batches = (
            version.plan.strategy.mode == "batch"
        )  # otherwise its workers take rows while they work on others
        self.batch_size: int | None = None  # once it is known
        self._portal, self._version = portal, version
        if not self.batches:
            self.batch_size = CHUNK
        elif batch_size is not None:
            self._set(batch_size)

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        """Rows go to the workers in flights: of a batch where that takes long, of several where it
        does not.
        """
        if self.batch_size is None:
            yield from self.calibrate(rows)
        assert self.batch_size is not None
        least = self.batch_size if self.batches else 1
        size, flights = least, deque[RowFlight]()
        answer, landed, more = (
            0,
            time.monotonic(),
            True,
        )  # bytes of an answer; the time of the last flight's end
        while True:
            while more and (count := sum(flight.rows for flight in flights)) < 2 * (
                size + self.workers * self.batch_size
            ):
                if flights and sum(flight.size for flight in flights) + count * answer > IN_HAND:
                    break
                if more := bool(taken := _take(rows, size)):
                    flights.append(self._submit(taken))
            if not flights:
                return
            results = flights[0].results.result()
            flights.popleft()
            answer, before, landed = (
                sum(len(each.body) for each in results) // len(results),
                landed,
                time.monotonic(),
            )
            if landed - before < QUICK and size < CHUNK:
                size *= 2
            elif landed - before > SLOW:
                size = max(least, size // 2)
            yield from results

    def calibrate(self, rows: Iterator[Row]) -> Iterator[RowResult]:
        size, best = 1, 0.0
        while True:
            self._set(size)
            count, results, begun, measured, more = (
                size * self.workers,
                list[RowResult](),
                0.0,
                0,
                True,
            )
            while more and (measured < 2 * count or time.monotonic() - begun < STEP):
                taken = _take(rows, count)
                results += self._submit(taken).results.result()
                more, measured = (
                    len(taken) == count,
                    measured + count if begun else 0,
                )  # the first round is for warming up
                begun = begun or time.monotonic()
            rate = measured / max(
                time.monotonic() - begun, 1e-9
            )  # without rows no time may have passed
            yield from results
            if not more or rate < best * GROWTH:  # too few rows to say, or no better
                self._set(max(1, size // 2))
                return
            if size == LARGEST or count / rate > LONGEST or self._full():
                return
            best, size = rate, size * 2

    def _full(self) -> bool:
        cut = any(key[0] == OUT_OF_MEMORY for key in list(self._version.stats.handler_metrics))
        return cut or psutil.virtual_memory().percent > FULL

    def _set(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._portal.call(self._version.change, {"batch_size": batch_size})

    def _submit(self, rows: Sequence[Row]) -> RowFlight:
        return RowFlight(
            len(rows),
            sum(len(row.body) for row in rows),
            self._portal.start_task_soon(self._answers, rows),
        )

    async def _answers(self, rows: Sequence[Row]) -> list[RowResult]:
        """In the order of the rows. Raises Unavailable where the model has no worker any more."""
        now, most, jobs = time.monotonic(), self._version.max_response_size, list[WaitingJob]()
        for row in rows:
            if row.error is None:
                jobs.append(
                    WaitingJob(
                        b"%d\r\n\r\n%b" % (row.index, _headers(row.content_type)), row.body, now
                    )
                )
                self._version.submit(jobs[-1])
        answers = iter(
            await asyncio.gather(*(job.read_all(most) for job in jobs), return_exceptions=True)
        )
        return [
            _result(row, next(answers)) if row.error is None else row.failed(400, row.error)
            for row in rows
        ]


class RowFlight(NamedTuple):
    """Rows that went to the workers together."""

    rows: int
    size: int  # bytes
    results: Future[list[RowResult]]


def _take(rows: Iterator[Row], count: int) -> list[Row]:
    """Fewer where they are large, or where no more come."""
    taken, size = list[Row](), 0
    for row in rows:
        taken.append(row)
        size += len(row.body)
        if len(taken) == count or size > IN_HAND // 8:
            break
    return taken


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
