"""The front end's end of a worker's socket: sends a batch as one frame, and receives one frame."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

from tsx_runtime import wire
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.errors import LoadFailed, LoadOutOfMemory

SMALL = 256 << 10  # frames up to this size are read without an allocation of their own
MOST_FACTS = (
    8 << 20
    # bytes of a report: what a worker bounds itself to is smaller, and an archive may have written
    # its own
)
PIECES_PER_TURN = 32  # parts of streams before other connections have their turn
JOINED = 64 << 10  # up to this size one copy is cheaper than a list of pieces for the kernel
_PACK = [
    struct.Struct(f"{count}d").pack for count in range(129)
]  # of nearly all batches; `struct.pack` looks for its format first

logger = logging.getLogger("tsx.channel")


class SentBatch(NamedTuple):
    """A batch that was sent to the worker."""

    batch: int
    jobs: list[Job]
    at: float
    deaths: int  # workers that died with all of these jobs before
    free: float  # since when there was room for it
    arrivals: bytes  # of its jobs, see `arrivals`


class Owner(Protocol):
    """The owner of a channel, which gets its replies and its end."""

    def new_channel(self) -> Channel: ...

    def on_reply(self, channel: Channel, sent: SentBatch, frame: wire.Frame) -> None: ...

    def on_begun(self, job: Job, headers: wire.Buffer) -> wire.Buffer:
        """An answer begins to stream: its headers, as the client gets them."""

    def on_report(self, channel: Channel, facts: dict[str, Any]) -> None:
        """What the handler raised, printed and counted, in the form of `wire`."""

    def on_closed(self, channel: Channel) -> None: ...

    def on_proven(self) -> None:
        """Requests with which a worker died have not killed this one: others may join them."""

    def remove(self, channel: Channel) -> None:
        """Nothing more is to be sent on it."""


class Channel(asyncio.BufferedProtocol):
    """Holds at most a few batches, in order; the worker runs the first, the others have not
    started.

    `loaded` gets the facts of the LOADED frame, or the `LoadFailed` of a FAILED frame or of an
    early end.
    """

    def __init__(self, owner: Owner) -> None:
        loop = asyncio.get_running_loop()
        self.owner = owner
        self.loaded: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.sent: deque[SentBatch] = deque()
        self.worker = ""  # whose it is
        self.prefetch = False  # whether the worker prepares a second batch while it runs the first
        self.answered = 0  # requests
        self.threads = 0  # that its torch may use
        self.shares_cores = False  # see `LoadOrder`
        self.devices: Sequence[int | None] = (
            None,
        )  # that the worker uses: numbers of GPUs, or the CPU
        self.pings = 0  # that the worker has not answered
        self.replied = 0.0  # time.monotonic() of the last reply
        self.streaming: set[int] = set()  # positions in the first batch whose answer has begun
        # time.monotonic() when the worker began its first batch, or last sent a piece of it; of an
        # idle one, since when
        self.began = 0.0
        self._called_off = (
            False  # whether the worker was told that no client waits for the first batch
        )
        self._held: set[Job] = set()  # whose clients are slower than the worker
        self._drained: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._next_batch = 0
        self._small = bytearray(SMALL)
        self._view = memoryview(self._small)
        self._end = 0
        self._large: bytearray | None = None
        self._large_end = 0
        self._pieces = 0  # parts of streams that were read in this turn of the event loop
        self._has_turn = False  # a turn is scheduled, in which the frames that have come are read

    @property
    def batches(self) -> int:
        return len(self.sent)

    @property
    def suspected(self) -> bool:
        """Whether it works on requests with which a worker died."""
        return bool(self.sent) and self.sent[0].deaths != 0

    # What the owner calls

    def load(self, order: wire.LoadOrder) -> None:
        assert self._transport is not None
        self.threads, self.shares_cores = order["threads"] or 0, order["shares_cores"]
        self._transport.writelines(wire.encode(wire.Kind.LOAD, 0, extra=json.dumps(order).encode()))

    def send(self, jobs: list[Job], now: float, deaths: int = 0) -> None:
        assert self._transport is not None
        free = now
        if not self.sent:
            free, self.began = self.began, now
        batch = self._next_batch = (self._next_batch + 1) & 0xFFFFFFFF
        fields: list[wire.Body] = []
        for job in jobs:
            fields += (job.meta, job.body)
        buffers = wire.encode_fields(wire.Kind.BATCH, batch, [0] * len(jobs), fields)
        self.sent.append(SentBatch(batch, jobs, now, deaths, free, arrivals(jobs)))
        if sum([*map(len, buffers)]) <= JOINED:
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)

    def set_threads(self, threads: int) -> None:
        """From its next batch on."""
        assert self._transport is not None
        if threads != self.threads:
            self.threads = threads
            self._transport.writelines(wire.encode(wire.Kind.THREADS, threads))

    def ping(self) -> None:
        """Ask for a sign of life; `pings` is 0 again when it is there."""
        assert self._transport is not None
        self.pings += 1
        if not self._transport.is_closing():
            self._transport.writelines(wire.encode(wire.Kind.PING, 0))

    def close(self) -> None:
        """The worker ends when it has read to the end; `closed` tells when it has let go of the
        socket.
        """
        if self._transport is not None:
            self._transport.close()

    def hold(self, job: Job) -> None:
        """Read nothing more from the worker; the others of its batch wait as well.

        Its time does not run meanwhile.
        """
        if not self._held and self._transport is not None:
            self._transport.pause_reading()
        self._held.add(job)

    def release(self, job: Job) -> None:
        self._held.discard(job)
        if not self._held and self._transport is not None and not self._transport.is_closing():
            self.began = time.monotonic()
            if not self._has_turn:
                self._transport.resume_reading()

    def cancel(self, job: Job) -> None:
        """No client waits for this answer any more.

        Once that is so for all of its batch, the worker is told.
        """
        if self.sent and job in self.sent[0].jobs:
            self._call_off()

    def holds(self, job: Job) -> bool:
        """Whether it holds `job`, and its answer has not begun."""
        return any(
            job in sent.jobs
            and not (sent is self.sent[0] and sent.jobs.index(job) in self.streaming)
            for sent in self.sent
        )

    @property
    def held(self) -> bool:
        return bool(self._held)

    async def drained(self) -> None:
        """Wait until it holds nothing, or is closed."""
        if self.sent and not self.closed.done():
            if self._drained is None:
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._drained, self.closed], return_when=asyncio.FIRST_COMPLETED)

    # What the event loop calls

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
                    whole, self._large = memoryview(self._large), None
                    self._on_frame(
                        wire.decode(wire.decode_header(whole), whole[wire.HEADER.size :])
                    )
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
            self.loaded.exception()  # marks it as retrieved: its starter may be gone
        if not self.closed.done():
            self.closed.set_result(None)
        self.owner.on_closed(self)

    # Reading

    def _read_small(self) -> None:
        start = self._pieces = 0
        while self._end - start >= wire.HEADER.size:
            if self._pieces > PIECES_PER_TURN:
                self._take_turn()
                break
            header = wire.decode_header(self._view[start : self._end])
            end = start + wire.HEADER.size + header.size
            if end - start > SMALL:
                self._large = bytearray(end - start)
                self._large_end = self._end - start
                self._large[: self._large_end] = self._view[start : self._end]
                start = self._end
                break
            if end > self._end:
                break
            self._on_frame(wire.decode(header, self._view[start + wire.HEADER.size : end]))
            start = end
        rest = self._end - start
        if start and rest:
            self._small[:rest] = self._small[start : self._end]
        self._end = rest

    def _take_turn(self) -> None:
        """Read the frames that have come in another turn, and nothing from the socket until
        then.
        """
        assert self._transport is not None
        if not self._has_turn:
            self._has_turn = True
            if not self._held:
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
            if not self._has_turn and not self._held:
                self._transport.resume_reading()

    def _on_frame(self, frame: wire.Frame) -> None:
        if frame.kind is wire.Kind.REPLY:
            sent = self._expect(frame)
            if len(frame.items) != len(sent.jobs):
                raise wire.FrameError(f"{len(frame.items)} answers for {len(sent.jobs)} requests")
            check_extra(frame)
            self.sent.popleft()
            self.answered += len(sent.jobs)
            self.streaming.clear()
            self._called_off = False
            self.began = time.monotonic()
            if self._drained is not None and not self.sent:
                self._drained.set_result(None)
                self._drained = None
            self.owner.on_reply(self, sent, frame)
        elif frame.kind is wire.Kind.PIECE:
            sent = self._expect(frame)
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
                    self._call_off()
        elif frame.kind in (wire.Kind.LOADED, wire.Kind.FAILED) and not self.loaded.done():
            self._on_loaded(frame)
        elif frame.kind is wire.Kind.PONG and self.pings:
            self.pings -= 1
        elif frame.kind is wire.Kind.REPORT:
            try:
                self.owner.on_report(self, _facts(frame))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise wire.FrameError(f"the worker's report is invalid: {error!r}") from error
        else:
            raise wire.FrameError(f"a worker does not send {frame.kind.name} here")

    def _call_off(self) -> None:
        """Where no client of the first batch waits: the handler stops at its next part.

        The batch is still closed by a reply.
        """
        assert self._transport is not None
        first = self.sent[0]
        if (
            not self._called_off
            and all(job.gone for job in first.jobs)
            and not self._transport.is_closing()
        ):
            self._called_off = True
            self._transport.writelines(wire.encode(wire.Kind.CANCEL, first.batch))

    def _expect(self, frame: wire.Frame) -> SentBatch:
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
    if len(frame.extra) > MOST_FACTS:
        raise wire.FrameError(
            f"the worker's report has {len(frame.extra)} bytes; at most {MOST_FACTS} are read"
        )
    try:
        facts: dict[str, Any] = json.loads(bytes(frame.extra))
    except (ValueError, RecursionError) as error:
        raise wire.FrameError(f"the worker's report is not JSON: {error}") from error
    return facts


def check_extra(frame: wire.Frame) -> None:
    """Of a reply, before anything is done with it. Raises FrameError."""
    if 0 < len(frame.extra) < wire.TIMES.size:
        raise wire.FrameError(
            f"the extra of a reply has {len(frame.extra)} bytes, fewer than its times"
        )


def arrivals(jobs: Sequence[Job]) -> bytes:
    """When each arrived, in the order of a queue (`queue.urgency`).

    To be asked when they are sent: when they are answered, each of them would have to be brought
    into the processor's cache again.
    """
    count = len(jobs)
    if count == 1:
        return _PACK[1](jobs[0].arrived)
    pack = _PACK[count] if count < len(_PACK) else struct.Struct(f"{count}d").pack
    return pack(*[job.arrived for job in jobs])


def without_late(
    sent: SentBatch, frame: wire.Frame
) -> tuple[list[Job], bytes, Sequence[int], list[wire.Item]]:
    """The jobs of an answered batch that were not refused while it ran, with their arrivals,
    statuses and answers.
    """
    _, jobs, _, _, _, arrived = sent
    items = frame.items
    left = [position for position, job in enumerate(jobs) if not job.takes(items[position])]
    if len(left) == len(jobs):
        return jobs, arrived, frame.codes, items
    kept = [jobs[position] for position in left]
    return (
        kept,
        arrivals(kept),
        [frame.codes[position] for position in left],
        [items[position] for position in left],
    )
