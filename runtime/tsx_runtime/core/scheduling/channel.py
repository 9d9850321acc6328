"""The front end's side of a worker's socket: it sends batches and receives replies."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from tsx_runtime import wire
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.errors import LoadFailed, LoadOutOfMemory

MAX_SMALL_BYTES = 256 << 10  # frames up to this size are read without a separate allocation
# Workers limit their reports to fewer bytes, but code of an archive may send any.
MAX_REPORT_BYTES = 8 << 20
MAX_PIECES_PER_TURN = 32  # parts of streams that are read before other connections get a turn
MAX_JOINED_BYTES = 64 << 10  # up to this size, one copy is faster than a list of buffers
# Formats for the sizes of nearly all batches; `struct.pack` would have to look up its format.
_PACK = [struct.Struct(f"{count}d").pack for count in range(129)]

logger = logging.getLogger("tsx.channel")


class SentBatch(NamedTuple):
    """A batch that was sent to the worker."""

    batch: int
    jobs: list[Job]
    sent_at: float  # time.monotonic()
    deaths: int  # workers that have died with all of these jobs
    free_since: float  # time.monotonic() from which on the worker had room for it
    arrivals: bytes  # the jobs' arrival times, as `pack_arrivals` packs them


class Owner(Protocol):
    """The owner of a channel, which handles its replies and its end."""

    def new_channel(self) -> Channel: ...

    def on_reply(self, channel: Channel, sent: SentBatch, frame: wire.Frame) -> None: ...

    def on_begun(self, job: Job, headers: wire.Buffer) -> wire.Buffer:
        """Return the headers for the client of an answer that begins to stream."""

    def on_report(self, channel: Channel, facts: dict[str, Any]) -> None:
        """Receive a report of the handler's errors, output and metrics (see `wire`)."""

    def on_closed(self, channel: Channel) -> None: ...

    def on_proven(self) -> None:
        """Learn that requests with which another worker died have not killed this one."""

    def remove(self, channel: Channel) -> None:
        """Send nothing more on a channel."""


class Channel(asyncio.BufferedProtocol):
    """The connection to a worker. It holds a few batches in order, of which the first runs.

    `loaded` gets the facts of the LOADED frame. It gets a `LoadFailed` from a FAILED frame, or an
    EOFError if the worker ends before either.
    """

    def __init__(self, owner: Owner) -> None:
        loop = asyncio.get_running_loop()
        self.owner = owner
        self.loaded: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.sent: deque[SentBatch] = deque()
        self.worker = ""  # the worker's id
        self.prefetch = False  # whether the worker prepares a second batch while it runs the first
        self.answered = 0  # number of answered requests
        self.threads = 0  # threads of torch in the worker
        self.shares_cores = False  # see `LoadOrder`
        # The worker's devices: numbers of GPUs, or None for the CPU.
        self.devices: Sequence[int | None] = (None,)
        self.pings = 0  # pings that are not answered yet
        self.replied = 0.0  # time.monotonic() of the last reply
        self.streaming: set[int] = set()  # positions in the first batch whose answer has begun
        # The time.monotonic() of the worker's last event: the start of its first batch, a sent
        # piece, or the end of its last batch.
        self.began = 0.0
        # Whether the worker was told that no client waits for the first batch.
        self._is_cancelled = False
        self._slow_jobs: set[Job] = set()  # jobs for whose clients reading is paused
        self._drained: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._next_batch = 0
        self._adapter_answer: asyncio.Future[str | None] | None = None  # to the last ADAPTER frame
        self._small = bytearray(MAX_SMALL_BYTES)
        self._view = memoryview(self._small)
        self._end = 0
        self._large: bytearray | None = None
        self._large_end = 0
        self._pieces = 0  # parts of streams that were read in this event-loop iteration
        self._has_turn = False  # whether `_begin_turn` is scheduled

    @property
    def batches(self) -> int:
        return len(self.sent)

    @property
    def has_suspects(self) -> bool:
        """Whether it runs requests with which another worker died."""
        return bool(self.sent) and self.sent[0].deaths != 0

    # The methods below are called by the owner.

    def load(self, order: wire.LoadOrder) -> None:
        assert self._transport is not None
        self.threads, self.shares_cores = order["threads"] or 0, order["shares_cores"]
        self._transport.writelines(wire.encode(wire.Kind.LOAD, 0, extra=json.dumps(order).encode()))

    def send(self, jobs: list[Job], now: float, deaths: int = 0) -> None:
        assert self._transport is not None
        free_since = now
        if not self.sent:
            free_since, self.began = self.began, now
        batch = self._next_batch = (self._next_batch + 1) & 0xFFFFFFFF
        fields: list[wire.Body] = []
        for job in jobs:
            fields += (job.meta, job.body)
        buffers = wire.encode_fields(wire.Kind.BATCH, batch, [0] * len(jobs), fields)
        self.sent.append(SentBatch(batch, jobs, now, deaths, free_since, pack_arrivals(jobs)))
        if sum([*map(len, buffers)]) <= MAX_JOINED_BYTES:
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)

    def set_threads(self, threads: int) -> None:
        """Set the number of threads from the next batch on."""
        assert self._transport is not None
        if threads != self.threads:
            self.threads = threads
            self._transport.writelines(wire.encode(wire.Kind.THREADS, threads))

    async def set_adapter(self, name: str, directory: Path | None) -> str | None:
        """Make the worker take an adapter, or drop it if `directory` is None.

        The next call must wait for the end of this one.

        Returns:
            The reason why the worker did not, or None.
        """
        assert self._transport is not None
        self._adapter_answer = answer = asyncio.get_running_loop().create_future()
        order = json.dumps({"name": name, "directory": directory and str(directory)}).encode()
        self._transport.writelines(wire.encode(wire.Kind.ADAPTER, 0, extra=order))
        await asyncio.wait([answer, self.closed], return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else "the worker has ended"

    def ping(self) -> None:
        """Request a sign of life; `pings` is 0 again when it has arrived."""
        assert self._transport is not None
        self.pings += 1
        if not self._transport.is_closing():
            self._transport.writelines(wire.encode(wire.Kind.PING, 0))

    def close(self) -> None:
        """Close the socket; the worker then ends, and `closed` reports its end."""
        if self._transport is not None:
            self._transport.close()

    def hold(self, job: Job) -> None:
        """Stop reading from the worker until `release`; its whole batch waits.

        The batch's time limit does not run meanwhile.
        """
        if not self._slow_jobs and self._transport is not None:
            self._transport.pause_reading()
        self._slow_jobs.add(job)

    def release(self, job: Job) -> None:
        self._slow_jobs.discard(job)
        if not self._slow_jobs and self._transport is not None and not self._transport.is_closing():
            self.began = time.monotonic()
            if not self._has_turn:
                self._transport.resume_reading()

    def cancel(self, job: Job) -> None:
        """Note that no client waits for an answer.

        The worker is told once, when this is so for its whole batch.
        """
        if self.sent and job in self.sent[0].jobs:
            self._cancel_batch()

    def holds(self, job: Job) -> bool:
        """Tell whether the worker has a job whose answer has not begun."""
        return any(
            job in sent.jobs
            and not (sent is self.sent[0] and sent.jobs.index(job) in self.streaming)
            for sent in self.sent
        )

    @property
    def is_paused(self) -> bool:
        return bool(self._slow_jobs)

    async def drained(self) -> None:
        """Wait until the worker has no batch, or the channel is closed."""
        if self.sent and not self.closed.done():
            if self._drained is None:
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._drained, self.closed], return_when=asyncio.FIRST_COMPLETED)

    # The methods below are called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return memoryview(self._large)[self._large_end :]
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._large is not None:
                self._large_end += nbytes
                if self._large_end == len(self._large):
                    data, self._large = memoryview(self._large), None
                    self._on_frame(wire.decode(wire.decode_header(data), data[wire.HEADER.size :]))
            else:
                self._end += nbytes
                self._read_small()
        except wire.FrameError as error:
            self._stop_worker(error)

    def _stop_worker(self, error: wire.FrameError) -> None:
        logger.error("a worker sent an invalid frame, so it is stopped: %s", error)
        self.abort()

    def abort(self) -> None:
        self.owner.remove(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.loaded.done():
            self.loaded.set_exception(EOFError("the worker ended before it had loaded the model"))
            self.loaded.exception()  # This avoids a warning if nobody waits for it.
        if not self.closed.done():
            self.closed.set_result(None)
        self.owner.on_closed(self)

    # Reading of frames

    def _read_small(self) -> None:
        start = self._pieces = 0
        while self._end - start >= wire.HEADER.size:
            if self._pieces > MAX_PIECES_PER_TURN:
                self._take_turn()
                break
            header = wire.decode_header(self._view[start : self._end])
            end = start + wire.HEADER.size + header.size
            if end - start > MAX_SMALL_BYTES:
                self._large = bytearray(end - start)
                self._large_end = self._end - start
                self._large[: self._large_end] = self._view[start : self._end]
                start = self._end
                break
            if end > self._end:
                break
            self._on_frame(wire.decode(header, self._view[start + wire.HEADER.size : end]))
            start = end
        unread = self._end - start
        if start and unread:
            self._small[:unread] = self._small[start : self._end]
        self._end = unread

    def _take_turn(self) -> None:
        """Process the remaining frames later; until then, read nothing from the socket."""
        assert self._transport is not None
        if not self._has_turn:
            self._has_turn = True
            if not self._slow_jobs:
                self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        assert self._transport is not None
        self._has_turn = False
        if self._transport.is_closing():
            return
        try:
            self._read_small()
        except wire.FrameError as error:
            self._stop_worker(error)
        else:
            if not self._has_turn and not self._slow_jobs:
                self._transport.resume_reading()

    def _on_frame(self, frame: wire.Frame) -> None:
        if frame.kind is wire.Kind.REPLY:
            sent = self._sent_batch_of(frame)
            if len(frame.items) != len(sent.jobs):
                raise wire.FrameError(f"{len(frame.items)} answers for {len(sent.jobs)} requests")
            check_extra(frame)
            self.sent.popleft()
            self.answered += len(sent.jobs)
            self.streaming.clear()
            self._is_cancelled = False
            self.began = time.monotonic()
            if self._drained is not None and not self.sent:
                self._drained.set_result(None)
                self._drained = None
            self.owner.on_reply(self, sent, frame)
        elif frame.kind is wire.Kind.PIECE:
            sent = self._sent_batch_of(frame)
            self.began = time.monotonic()
            self._pieces += len(frame.items)
            for position, meta, body in frame.items:
                if position >= len(sent.jobs):
                    raise wire.FrameError(
                        f"a piece for request {position} of a batch of {len(sent.jobs)}"
                    )
                self.streaming.add(position)
                job = sent.jobs[position]
                job.piece(self.owner.on_begun(job, meta) if meta else meta, body, self)
                if job.gone:
                    self._cancel_batch()
        elif frame.kind in (wire.Kind.LOADED, wire.Kind.FAILED) and not self.loaded.done():
            self._on_loaded(frame)
        elif frame.kind is wire.Kind.PONG and self.pings:
            self.pings -= 1
        elif frame.kind is wire.Kind.ADAPTER and self._adapter_answer is not None:
            self._adapter_answer.set_result(_facts(frame).get("error"))
            self._adapter_answer = None
        elif frame.kind is wire.Kind.REPORT:
            try:
                self.owner.on_report(self, _facts(frame))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise wire.FrameError(f"the worker's report is invalid: {error!r}") from error
        else:
            raise wire.FrameError(f"a worker does not send {frame.kind.name} here")

    def _cancel_batch(self) -> None:
        """If no client waits for the first batch, tell the worker.

        The handler then stops before its next part. A REPLY frame still ends the batch.
        """
        assert self._transport is not None
        first = self.sent[0]
        if (
            not self._is_cancelled
            and all(job.gone for job in first.jobs)
            and not self._transport.is_closing()
        ):
            self._is_cancelled = True
            self._transport.writelines(wire.encode(wire.Kind.CANCEL, first.batch))

    def _sent_batch_of(self, frame: wire.Frame) -> SentBatch:
        if not self.sent or self.sent[0].batch != frame.batch:
            raise wire.FrameError(f"an answer for batch {frame.batch}, which is not in progress")
        return self.sent[0]

    def _on_loaded(self, frame: wire.Frame) -> None:
        facts = _facts(frame)
        if frame.kind is wire.Kind.LOADED:
            self.prefetch = facts.get("prefetch") is True
            self.loaded.set_result(facts)
        else:
            message, traceback, outline = (
                str(facts.get(name, "")) for name in ("message", "traceback", "outline")
            )
            error = (LoadOutOfMemory if facts.get("out_of_memory") is True else LoadFailed)(
                message, traceback=traceback
            )
            error.outline = outline
            self.loaded.set_exception(error)
            self.loaded.exception()


def _facts(frame: wire.Frame) -> dict[str, Any]:
    if len(frame.extra) > MAX_REPORT_BYTES:
        raise wire.FrameError(
            f"the worker's report has {len(frame.extra)} bytes; at most {MAX_REPORT_BYTES} are read"
        )
    try:
        facts: dict[str, Any] = json.loads(bytes(frame.extra))
    except (ValueError, RecursionError) as error:
        raise wire.FrameError(f"the worker's report is not JSON: {error}") from error
    return facts


def check_extra(frame: wire.Frame) -> None:
    """Check the extra of a reply before the reply is used.

    Raises:
        FrameError: The extra is too short.
    """
    if 0 < len(frame.extra) < wire.TIMES.size:
        raise wire.FrameError(
            f"the extra of a reply has {len(frame.extra)} bytes, fewer than its times"
        )


def pack_arrivals(jobs: Sequence[Job]) -> bytes:
    """Pack the arrival times of jobs that are in the order of a queue (`queue.urgency`).

    This is done when jobs are sent. At the reply it would be slower, since the processor would have
    to load each job into its cache again.
    """
    count = len(jobs)
    if count == 1:
        return _PACK[1](jobs[0].arrived)
    pack = _PACK[count] if count < len(_PACK) else struct.Struct(f"{count}d").pack
    return pack(*[job.arrived for job in jobs])


def without_refused(
    sent: SentBatch, frame: wire.Frame
) -> tuple[list[Job], bytes, Sequence[int], list[wire.Item]]:
    """Leave out the jobs of a reply that were refused while they ran.

    Returns:
        The other jobs, and their arrivals, statuses and answers.
    """
    _, jobs, _, _, _, packed_arrivals = sent
    items = frame.items
    positions = [position for position, job in enumerate(jobs) if not job.consumes(items[position])]
    if len(positions) == len(jobs):
        return jobs, packed_arrivals, frame.codes, items
    counted_jobs = [jobs[position] for position in positions]
    return (
        counted_jobs,
        pack_arrivals(counted_jobs),
        [frame.codes[position] for position in positions],
        [items[position] for position in positions],
    )
