"""Recording: a share of a model's requests is written to files, to be replayed later
(`recordings.py` has the format).

A recording never holds a request up: a thread writes, and where that is slower than requests come,
or the disk is full, requests are not recorded, and counted. Headers that may carry credentials or
identify the client are left out (`HeaderFilter`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import unquote_plus

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tsx_archiver.quantities import for_text, parse_bytes, parse_percent, parse_seconds
from tsx_runtime import wire
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.recording.segments import Segments, StoredSize
from tsx_runtime.core.scheduling.job import Job, ObservedAnswer, ObservedJob
from tsx_runtime.recordings import Headers, Recorded, encode
from tsx_runtime.shared.redaction import is_identifying_header, is_secret_header, redacted
from tsx_runtime.wire import Body, Parts

SMALLEST = 64 << 10  # bytes
MOST_WAITING = 32 << 20  # bytes that wait for the disk
LONGEST_ANSWER = 1 << 20  # bytes of an answer that is kept
REST = 10.0  # seconds without a try after the disk has failed
OFTEN, SELDOM = 1.0, 3600.0  # seconds between two looks for what is too old

_OF_CONNECTION = frozenset(
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
    | {"transfer-encoding", "upgrade", wire.NODE_HEADER.decode()}
)
_NEEDED = frozenset(  # to send it again
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
    """Selects the headers to record: none that identifies the client or may carry credentials."""

    def __init__(self, only: Sequence[str] | None) -> None:
        """`only`: the names of the headers that are kept beside those that it takes to send the
        request again; None for all.
        """
        self._only = None if only is None else _NEEDED | {name.lower() for name in only}

    def headers(self, block: str) -> Headers:
        return [
            (name, redacted(value))
            for name, value in wire.parse_header_block(block)
            if self._keeps(name.lower())
        ]

    def query(self, query: str) -> str:
        return "&".join(
            pair
            for pair in query.split("&")
            if not _is_private(unquote_plus(pair.partition("=")[0]))
        )

    def _keeps(self, name: str) -> bool:
        if name in _OF_CONNECTION or _is_private(name):
            return False
        return self._only is None or name in self._only


def _is_private(name: str) -> bool:
    return is_secret_header(name) or is_identifying_header(name)


class CapturedRequest(NamedTuple):
    """A request and its answer, before they are written to disk."""

    at: float
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
    """The observer of one model. For the event loop; a separate thread writes."""

    def __init__(
        self, name: str, config: RecordingConfig, directory: Path, headers: HeaderFilter
    ) -> None:
        self.config = config
        self.recorded = 0
        self.dropped: Counter[str] = Counter()  # by reason: slow, size, disk
        self.problem: str | None = None  # why the disk took nothing, the last time
        self._name = name
        self._filter = headers
        self._segments = Segments(directory, name, config.max_size, config.max_age)
        self._thread = ThreadPoolExecutor(1, "tsx-recording")
        self._loop = asyncio.get_running_loop()
        self._noted: deque[CapturedRequest] = deque()
        self._waiting = 0  # bytes of those, and of what is being written
        self._writing = False
        self._closed = False
        self._rest_until = 0.0
        self._stumbled = False  # over a request, not over the disk; of the thread's own
        self._sweeping: asyncio.Handle = self._loop.call_soon(self._sweep)

    def wants(self, draw: float) -> bool:
        return draw * 100 < self.config.share

    def watch(self, job: Job, version: ModelVersion) -> Job:
        most = LONGEST_ANSWER if self.config.answers else -1
        return ObservedJob(job, partial(self._note_answer, job, version), most)

    def _note_answer(self, job: Job, version: ModelVersion, seen: ObservedAnswer) -> None:
        seconds = time.monotonic() - job.arrived
        self.note(
            CapturedRequest(
                time.time() - seconds,
                version.version,
                job.meta,
                job.body,
                seen.status,
                seconds,
                b"" if seen.body is None else seen.headers,
                seen.body,
                version.precision,
            )
        )

    def note(self, noted: CapturedRequest) -> None:
        if self._closed:
            return
        if self._waiting and self._waiting + noted.size > MOST_WAITING:
            self.dropped["slow"] += 1
            return
        self._waiting += noted.size
        self._noted.append(noted)
        if not self._writing:
            self._writing = True
            self._loop.call_soon(self._write)  # what is answered in one turn is written at once

    async def kept(self) -> StoredSize:
        return await self._loop.run_in_executor(self._thread, self._segments.kept)

    async def close(self) -> None:
        """What was noted is written first."""
        if self._closed:
            return
        self._closed = True
        self._sweeping.cancel()
        self._write()
        await self._loop.run_in_executor(self._thread, self._segments.close)
        self._thread.shutdown(wait=False)

    def _write(self) -> None:
        batch, self._noted = self._noted, deque()
        if batch:
            self._thread.submit(self._write_all, batch)
        else:
            self._writing = False

    def _write_all(self, batch: deque[CapturedRequest]) -> None:
        """In the thread."""
        counts: Counter[str] = Counter()
        problem = None
        for noted in batch:
            try:
                counts[self._write_one(noted)] += 1
            except OSError as error:
                self._rest_until = time.monotonic() + REST
                problem = f"{error.filename or self._segments.directory}: {error.strerror or error}"
                counts["disk"] += 1
            except (
                Exception
            ) as error:  # the thread's boundary: one request that cannot be written must not end it
                problem = f"{type(error).__name__}: {error}"
                counts["disk"] += 1
                if not self._stumbled:
                    self._stumbled = True
                    logger.exception(
                        "model %s: a request cannot be written; further failures are only counted",
                        self._name,
                    )
        self._loop.call_soon_threadsafe(
            self._written, counts, sum(noted.size for noted in batch), problem
        )

    def _write_one(self, noted: CapturedRequest) -> str:
        if time.monotonic() < self._rest_until:
            return "disk"
        _, query, block = wire.parse_request_meta(noted.meta)
        body = b"".join(noted.body.pieces) if isinstance(noted.body, Parts) else bytes(noted.body)
        filter_ = self._filter
        answered = filter_.headers(noted.answer_headers.decode("latin-1"))
        asked = Recorded(
            noted.at,
            noted.version,
            filter_.query(query),
            filter_.headers(block),
            body,
            precision=noted.precision,
        )
        entry = asked._replace(
            status=noted.status, seconds=noted.seconds, answer_headers=answered, answer=noted.answer
        )
        return "recorded" if self._segments.write(encode(entry), time.time()) else "size"

    def _written(self, counts: Counter[str], size: int, problem: str | None) -> None:
        self._waiting -= size
        self.recorded += counts.pop("recorded", 0)
        self.dropped += counts
        if problem is not None:
            if self.problem is None:
                logger.warning("model %s: requests cannot be recorded: %s", self._name, problem)
            self.problem = problem
        elif self.recorded and not counts:
            self.problem = None
        self._write()

    def _sweep(self) -> None:
        """What is too old goes, also where nothing comes."""
        self._thread.submit(self._sweep_files)
        self._sweeping = self._loop.call_later(
            min(max(self.config.max_age / 8, OFTEN), SELDOM), self._sweep
        )

    def _sweep_files(self) -> None:
        try:
            self._segments.sweep(time.time())
        except OSError as error:
            logger.warning("model %s: old recordings cannot be removed: %s", self._name, error)


class RecordingConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[float, BeforeValidator(for_text(parse_percent))] = Field(
        100.0, gt=0, le=100, description="of the requests, in percent"
    )
    max_size: Annotated[int, BeforeValidator(for_text(parse_bytes))] = Field(
        100_000_000,
        ge=SMALLEST,
        description=(
            "maximum size of all files together: bytes, or a string such as 100MB; the oldest are"
            " removed first"
        ),
    )
    max_age: Annotated[float, BeforeValidator(for_text(parse_seconds))] = Field(
        86400.0,
        ge=1,
        le=3660 * 86400,
        description="age at which a request is removed: seconds, or a string such as 12h or 7d",
    )
    answers: bool = Field(False, description="record the answers as well")
