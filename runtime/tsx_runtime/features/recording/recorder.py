"""The recorder of a model: it writes a fraction of the requests to files that can be replayed.

`tsx_runtime.recordings` defines the format. A thread writes, so that no request waits. If requests
come faster than the disk can write them, they are counted as dropped. `HeaderFilter` leaves out
headers that may carry credentials or identify the client.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote_plus

from tsx_archiver.monitor.recording import RecordingConfig
from tsx_runtime import wire
from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Job, ObservedAnswer, ObservedJob
from tsx_runtime.features.recording.segments import Segments, StoredSize
from tsx_runtime.features.recording.upload import RecordingUploader
from tsx_runtime.recordings import Headers, Recorded, encode
from tsx_runtime.shared.redaction import is_identifying_header, is_secret_header, redacted
from tsx_runtime.wire import Body, Parts

MAX_WAITING_BYTES = 32 << 20  # limit of the bytes that wait for the disk
MAX_ANSWER_BYTES = 1 << 20  # larger answers are not recorded
DISK_RETRY_S = 10.0  # pause after the disk has failed
MIN_SWEEP_S, MAX_SWEEP_S = 1.0, 3600.0  # limits of the interval between two removals of old files

_CONNECTION_HEADERS = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "traceparent",
        "tracestate",
        "trailer",
    }
    | {"transfer-encoding", "upgrade", wire.NODE_HEADER.decode(), wire.SPAN_HEADER}
)
# Headers that are needed to send a request again.
_REPLAY_HEADERS = frozenset(
    {
        "content-type",
        "content-encoding",
        "explain",
        "describe",
        "inference-header-content-length",
        "url_path",
        "x-tsx-protocol",
    }
)

logger = logging.getLogger("tsx.recording")


class HeaderFilter:
    """Chooses the headers to record: none that identifies the client or carries credentials."""

    def __init__(self, only: Sequence[str] | None) -> None:
        """Record the headers in `only` and those that a replay needs; None records all."""
        self._only = None if only is None else _REPLAY_HEADERS | {name.lower() for name in only}

    def headers(self, block: str) -> Headers:
        return [
            (name, redacted(value))
            for name, value in wire.parse_header_block(block)
            if self._is_recorded(name.lower())
        ]

    def query(self, query: str) -> str:
        return "&".join(
            pair
            for pair in query.split("&")
            if not _is_private(unquote_plus(pair.partition("=")[0]))
        )

    def _is_recorded(self, name: str) -> bool:
        if name in _CONNECTION_HEADERS or _is_private(name):
            return False
        return self._only is None or name in self._only


def _is_private(name: str) -> bool:
    return is_secret_header(name) or is_identifying_header(name)


class CapturedRequest(NamedTuple):
    """A request and its answer that are not written yet."""

    arrived_at: float
    version: str
    meta: bytes
    body: Body
    status: int
    seconds: float
    answer_headers: bytes
    answer: bytes | None
    precision: str | None = None

    @property
    def size(self) -> int:
        return len(self.meta) + len(self.body) + len(self.answer or b"")


class Recorder:
    """Records requests of one model. It runs in the event loop, and its thread writes the files."""

    def __init__(
        self,
        name: str,
        config: RecordingConfig,
        directory: Path,
        headers: HeaderFilter,
        uploader: RecordingUploader | None = None,
    ) -> None:
        self.config = config
        self.recorded = 0
        self.dropped: Counter[str] = Counter()  # number of requests by reason: slow, size or disk
        self.problem: str | None = None  # the last error of the disk
        self.upload_problem: str | None = None  # why the last upload failed
        self._name = name
        self._filter = headers
        self._uploader = uploader
        self._upload_lock = asyncio.Lock()
        self._uploads = TaskGroup()
        self._ended_files = 0
        self._segments = Segments(
            directory, name, config.max_size, config.max_age, uploads=uploader is not None
        )
        self._thread = ThreadPoolExecutor(1, "tsx-recording")
        self._loop = asyncio.get_running_loop()
        self._in_thread = partial(self._loop.run_in_executor, self._thread)
        self._captured: deque[CapturedRequest] = deque()
        self._waiting = 0  # bytes that are captured and not written yet
        self._is_writing = False
        self._closed = False
        self._retry_at = 0.0
        self._has_logged_failure = False  # used only in the thread
        self._sweep_timer: asyncio.Handle = self._loop.call_soon(self._sweep)

    def should_observe(self, draw: float) -> bool:
        return draw * 100 < self.config.share

    def wrap_job(self, job: Job, version: ModelVersion) -> Job:
        max_answer_bytes = MAX_ANSWER_BYTES if self.config.answers else -1
        return ObservedJob(job, partial(self._capture_answer, job, version), max_answer_bytes)

    def _capture_answer(self, job: Job, version: ModelVersion, response: ObservedAnswer) -> None:
        seconds = time.monotonic() - job.arrived
        self.capture(
            CapturedRequest(
                time.time() - seconds,
                version.version,
                job.meta,
                job.body,
                response.status,
                seconds,
                b"" if response.body is None else response.headers,
                response.body,
                version.precision,
            )
        )

    def capture(self, request: CapturedRequest) -> None:
        """Queue a request for writing, or count it as dropped."""
        if self._closed:
            return
        if self._waiting and self._waiting + request.size > MAX_WAITING_BYTES:
            self.dropped["slow"] += 1
            return
        self._waiting += request.size
        self._captured.append(request)
        if not self._is_writing:
            self._is_writing = True
            # Requests that are answered in the same event-loop iteration are written together.
            self._loop.call_soon(self._write)

    def has_waiting(self, max_age: float, max_size: int) -> bool:
        """Tell whether recorded requests have waited for an upload for too long."""
        begin_time = self._segments.begin_time
        return begin_time is not None and (
            time.time() - begin_time >= max_age or self._segments.size >= max_size
        )

    async def upload(self, min_age: float = 0.0) -> None:
        """Upload the files that have ended, and the current one if it is `min_age` seconds old.

        After a failure, which `upload_problem` tells, the next call tries again.
        """
        self._write()
        async with self._upload_lock:
            if self._uploader is None:
                return
            problem = None
            try:
                # The time is that after the captured requests have been written.
                files = await self._in_thread(
                    lambda: self._segments.ended_files(time.time(), min_age)
                )
                for file in files:
                    await asyncio.to_thread(self._uploader.upload, file, self._name)
                    await self._in_thread(self._segments.mark_uploaded, file)
            except OSError as error:
                if self.upload_problem is None:
                    logger.warning("model %s: recordings wait for an upload: %s", self._name, error)
                problem = str(error)
            self.upload_problem = problem

    async def stored_size(self) -> StoredSize:
        return await self._in_thread(self._segments.stored_size)

    async def close(self) -> None:
        """Stop recording, and write and upload the requests that are already captured."""
        if self._closed:
            return
        self._closed = True
        self._sweep_timer.cancel()
        self._write()
        await self.upload()
        async with self._upload_lock:
            self._uploader = None
            await self._in_thread(self._segments.close)
            self._thread.shutdown(wait=False)

    def _write(self) -> None:
        batch, self._captured = self._captured, deque()
        if batch:
            self._thread.submit(self._write_all, batch)
        else:
            self._is_writing = False

    def _write_all(self, batch: deque[CapturedRequest]) -> None:
        """Write requests; this runs in the thread."""
        counts: Counter[str] = Counter()
        problem = None
        for request in batch:
            try:
                counts[self._write_one(request)] += 1
            except OSError as error:
                self._retry_at = time.monotonic() + DISK_RETRY_S
                problem = f"{error.filename or self._segments.directory}: {error.strerror or error}"
                counts["disk"] += 1
            # The thread must go on, even if one request cannot be written.
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                counts["disk"] += 1
                if not self._has_logged_failure:
                    self._has_logged_failure = True
                    logger.exception(
                        "model %s: a request cannot be written; further failures are only counted",
                        self._name,
                    )
        self._loop.call_soon_threadsafe(
            self._finish_batch, counts, sum(request.size for request in batch), problem
        )

    def _write_one(self, request: CapturedRequest) -> str:
        if time.monotonic() < self._retry_at:
            return "disk"
        request_id, query, block = wire.parse_request_meta(request.meta)
        body = (
            b"".join(request.body.pieces)
            if isinstance(request.body, Parts)
            else bytes(request.body)
        )
        header_filter = self._filter
        answer_headers = header_filter.headers(request.answer_headers.decode("latin-1"))
        recorded = Recorded(
            request.arrived_at,
            request.version,
            header_filter.query(query),
            header_filter.headers(block),
            body,
            precision=request.precision,
            request_id=request_id,
        )
        entry = recorded._replace(
            status=request.status,
            seconds=request.seconds,
            answer_headers=answer_headers,
            answer=request.answer,
        )
        return "recorded" if self._segments.write(encode(entry), time.time()) else "size"

    def _finish_batch(self, counts: Counter[str], size: int, problem: str | None) -> None:
        self._waiting -= size
        self.recorded += counts.pop("recorded", 0)
        self.dropped += counts
        if problem is not None:
            if self.problem is None:
                logger.warning("model %s: requests cannot be recorded: %s", self._name, problem)
            self.problem = problem
        elif self.recorded and not counts:
            self.problem = None
        if self._segments.ended != self._ended_files:
            self._ended_files = self._segments.ended
            self._uploads.begin(self.upload(math.inf))
        self._write()

    def _sweep(self) -> None:
        """Remove old files now, and schedule the next removal."""
        self._thread.submit(self._sweep_files)
        self._sweep_timer = self._loop.call_later(
            min(max(self.config.max_age / 8, MIN_SWEEP_S), MAX_SWEEP_S), self._sweep
        )

    def _sweep_files(self) -> None:
        try:
            self._segments.sweep(time.time())
        except OSError as error:
            logger.warning("model %s: old recordings cannot be removed: %s", self._name, error)
