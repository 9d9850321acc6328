"""The engine on this machine: the model's own workers, as a server would start them, with as many rows in hand as keep them busy."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import psutil

from tsx_cli.batch.rows import Row, RowResult
from tsx_cli.bench.model.configuration import Configuration
from tsx_cli.bench.storage.archive_record import read_record
from tsx_cli.common.client import error_text
from tsx_cli.common.failure import CliError
from tsx_runtime import wire
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.placement.devices import cpu_count
from tsx_runtime.core.registry.registry import open_model
from tsx_runtime.core.scheduling.job import Flow
from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.errors import TsxError, Unavailable
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.content_types import looks_like
from tsx_runtime.wire import Body, Buffer

CHUNK = 64  # rows at least that go to the workers' queue together
IN_HAND = 256 << 20  # bytes of rows that are under way
LARGEST = 4096  # batch size that calibration tries
GROWTH = 1.05  # in rows per second, for which a larger batch is worth its memory
STEP = 0.25  # seconds at least that a batch size is measured for
FULL = 85.0  # per cent of the memory in use, beyond which nothing grows
OUT_OF_MEMORY = "tsx_oom_retries_total"  # what a worker counts that has cut a batch


class Recommendation(NamedTuple):
    """What the archive's measurement recommends; None where it says nothing of this machine."""

    workers: int | None = None
    batch_size: int | None = None


def recommendation(model: Path) -> Recommendation:
    """The number of workers of the measured winner, and the batch size with which one of them had the most rows per second."""
    record = read_record(model)
    if record is None or not record.here:
        return Recommendation()
    best = Configuration(**record.best.configuration)
    curves = [curve for curve in record.curves if curve.variant.kind == best.variant.kind]
    threads = best.threads_each(record.environment.cores)
    points = [point for curve in [curve for curve in curves if curve.threads == threads] or curves for point in curve.points]
    sizes = {point.batch_size: point.batch_size / point.median_ms for point in points if point.median_ms > 0}
    return Recommendation(best.workers, max(sizes, key=sizes.__getitem__) if sizes else best.batch_size)


@contextmanager
def open_local(model: Path, settings: Settings, workers: int | None = None, batch_size: int | None = None) -> Iterator[LocalEngine]:
    """`workers` and `batch_size`: instead of what the measurement recommends or the machine has room for. Raises as `open_model` does."""
    measured = recommendation(model)
    opened: Future[LocalEngine] = Future()
    ended = asyncio.Event()

    async def serve() -> None:
        async with open_model(model, settings, workers=0) as version:
            _check(version)
            count = workers or measured.workers or 1
            await version.scale(count, count)
            if not (workers or measured.workers):
                count = _room_for(version)
                await version.scale(count, count)
            version.change({"job_queue_size": 1 << 30, "max_queue_bytes": 1 << 50})  # the engine bounds what is under way
            opened.set_result(LocalEngine(asyncio.get_running_loop(), version, count, batch_size or measured.batch_size))
            await ended.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    thread = threading.Thread(target=run, name="model")
    thread.start()
    try:
        engine = opened.result()
        try:
            yield engine
        finally:
            engine.loop.call_soon_threadsafe(ended.set)
    finally:
        thread.join()


def _check(version: ModelVersion) -> None:
    strategy = version.plan.strategy
    if strategy.sequences is not None or strategy.tickets:
        what = (
            "its requests belong to sequences (sequenceBatching)" if strategy.sequences is not None else "no request waits (useJobTicket)"
        )
        raise CliError(f"{version.label} cannot answer rows: {what}; change its model-config.yaml")


def _room_for(version: ModelVersion) -> int:
    """As many workers as the archive says, or there are GPUs, or as cores and memory allow; one is there."""
    plan = version.plan
    if version.config.min_workers or plan.gpus or plan.parallel.is_group:
        return version.config.min_workers or max(1, len(plan.gpus) // max(1, plan.parallel.gpus))
    first = version.workers[0].pid
    size = psutil.Process(first).memory_info().rss if first is not None else 0
    free = psutil.virtual_memory().available * FULL / 100
    return max(1, min(cpu_count() // (plan.threads or 1), 1 + int(free // max(size, 1))))


class LocalEngine:
    """See `BatchEngine`. Without a batch size it is found on the first rows: doubled for as long as the rows per second grow."""

    def __init__(self, loop: asyncio.AbstractEventLoop, version: ModelVersion, workers: int, batch_size: int | None) -> None:
        self.loop = loop
        self.workers = workers
        self.batches = version.plan.strategy.mode == "batch"  # otherwise its workers take rows while they work on others
        self.batch_size: int | None = None  # once it is known
        self._version = version
        if not self.batches:
            self.batch_size = CHUNK * workers
        elif batch_size is not None:
            self._set(batch_size)

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        if self.batch_size is None:
            yield from self._calibrate(rows)
        assert self.batch_size is not None
        size = -(-CHUNK // self.batch_size) * self.batch_size
        most = 2 + (2 * self.workers + 2) * self.batch_size // size
        flights: deque[RowFlight] = deque()
        bytes_in_hand, more = 0, True
        while True:
            while more and len(flights) < most and (not flights or bytes_in_hand < IN_HAND):
                more = bool(taken := _take(rows, size))
                if taken:
                    flights.append(self._submit(taken))
                    bytes_in_hand += flights[-1].size
            if not flights:
                return
            bytes_in_hand -= flights[0].size
            yield from flights.popleft().wait()

    def _calibrate(self, rows: Iterator[Row]) -> Iterator[RowResult]:
        size, before, best = 1, 1, 0.0
        while True:
            self._set(size)
            yield from (results := self._measure(rows, size))[0]
            rate = results[1]
            if rate is None or rate < best * GROWTH:
                break
            best, before = rate, size
            seconds = size * self.workers / rate  # of a batch
            if size == LARGEST or seconds > self._version.plan.response_timeout / 4 or self._full():
                break
            size *= 2
        self._set(before)

    def _measure(self, rows: Iterator[Row], size: int) -> tuple[list[RowResult], float | None]:
        """Results, and rows per second; None where the rows do not suffice."""
        count, found = size * self.workers, list[RowResult]()
        begun, measured = 0.0, 0
        while begun == 0.0 or time.monotonic() - begun < STEP or measured < 2 * count:
            taken = _take(rows, count)
            found += self._submit(taken).wait() if taken else []
            if len(taken) < count:
                return found, None
            measured = measured + count if begun else 0  # the first round is for warming up
            begun = begun or time.monotonic()
        return found, measured / (time.monotonic() - begun)

    def _full(self) -> bool:
        cut = any(key[0] == OUT_OF_MEMORY for key in list(self._version.stats.handler_metrics))
        return cut or psutil.virtual_memory().percent > FULL

    def _set(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.loop.call_soon_threadsafe(self._version.change, {"batch_size": batch_size})

    def _submit(self, rows: Sequence[Row]) -> RowFlight:
        flight = RowFlight(rows, self._version.max_response_size)
        self.loop.call_soon_threadsafe(flight.submit, self._version)
        return flight


def _take(rows: Iterator[Row], count: int) -> list[Row]:
    """Fewer where they are large, or where no more come."""
    taken, size = list[Row](), 0
    for row in rows:
        taken.append(row)
        size += len(row.body)
        if len(taken) == count or size > IN_HAND // 8:
            break
    return taken


class RowFlight:
    """Rows that went to the workers together. Everything but `wait` runs on the loop."""

    def __init__(self, rows: Sequence[Row], max_response_size: int) -> None:
        self.size = sum(len(row.body) for row in rows)
        self.max_response_size = max_response_size
        self.arrived = 0.0
        self._rows = rows
        self._left = len(rows)
        self._results: list[RowResult | None] = [None] * len(rows)
        self._over = threading.Event()
        self._error: TsxError | None = None

    def submit(self, version: ModelVersion) -> None:
        self.arrived = time.monotonic()
        for position, row in enumerate(self._rows):
            version.submit(RowJob(self, position, row))

    def done(self, position: int, result: RowResult) -> None:
        self._results[position] = result
        self._left -= 1
        if not self._left:
            self._over.set()

    def fail(self, error: TsxError) -> None:
        """No row can succeed any more."""
        self._error = error
        self._over.set()

    def wait(self) -> list[RowResult]:
        """In the order of the rows. Raises TsxError where the model has no worker any more."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return [result for result in self._results if result is not None]


class RowJob:
    """See `Job`."""

    __slots__ = (
        "_flight",
        "_pieces",
        "_position",
        "_row",
        "_size",
        "arrived",
        "body",
        "deadline",
        "gone",
        "meta",
        "priority",
        "routed",
        "watched",
    )

    def __init__(self, flight: RowFlight, position: int, row: Row) -> None:
        self.meta = b"%d\r\n\r\n%b" % (row.index, _headers(row.content_type))
        self.body: Body = row.body
        self.arrived = flight.arrived
        self.deadline: float | None = None
        self.priority = 0
        self.gone = False
        self._flight, self._position, self._row = flight, position, row
        self._pieces: list[bytes] = []  # of a streamed answer
        self._size = 0

    @property
    def request_id(self) -> bytes:
        return b"%d" % self._row.index

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        content = b"".join((*self._pieces, bytes(body))) if status < 400 else bytes(body)
        if self._size > self._flight.max_response_size:
            status, content = 500, b"The parts of the answer have more bytes than max_response_size allows."
        content_type = _content_type(bytes(headers)) or looks_like(content)
        self._finish(status, content_type, content, error_text(content) if status >= 400 else None)

    def refuse(self, error: TsxError) -> None:
        if isinstance(error, Unavailable):
            self._flight.fail(error)
        else:
            self._finish(error.status, "", b"", error.message)

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        self._size += len(body)
        if self._size <= self._flight.max_response_size:
            self._pieces.append(bytes(body))

    def _finish(self, status: int, content_type: str, body: bytes, error: str | None) -> None:
        self._flight.done(self._position, RowResult(self._row.index, self._row.id, status, content_type, body, error))


@lru_cache(256)
def _headers(content_type: str) -> bytes:
    return wire.header_block([(b"content-type", content_type.encode())])


@lru_cache(256)
def _content_type(headers: bytes) -> str:
    found: Mapping[str, str] = {name.lower(): value for name, value in wire.parse_header_block(headers.decode("latin-1"))}
    return found.get("content-type", "")
