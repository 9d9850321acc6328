"""The channel of a worker that accepts requests while it works on others, and answers them in any
order.

Each request is a batch of its own. What a client is too slow for must not hold up its neighbours,
so a stream that is held goes on being read, until `HELD_MOST` bytes wait for its client; only then
nothing is read from the worker until the client has taken them or is closed (`write_timeout`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tsx_runtime import wire
from tsx_runtime.core.scheduling.channel import Channel, Owner, SentBatch, arrivals, check_extra
from tsx_runtime.core.scheduling.job import Job

HELD_MOST = 4 << 20  # bytes of one streamed answer that may wait for its client before all wait
# seconds; a request that kills workers mostly does so at once, but on a busy machine that takes a
# while
QUARANTINE = 2.0


@dataclass(eq=False, slots=True)
class Flight:
    """A request in flight."""

    batch: int
    job: Job
    at: float
    deaths: int
    last: float  # time.monotonic() when it was sent, or a piece of its answer came
    streaming: bool = False
    ahead: int = 0  # bytes of its answer since its client was found too slow


class OpenChannel(Channel):
    """As a `Channel`, but `sent` holds at most one entry: all that is under way.

    `began` is when the worker was last heard of.

    Requests with which a worker died are in quarantine until each has begun to be answered, or some
    time has passed.
    """

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self.quarantine: set[Job] = set()
        self._quarantine_over: asyncio.TimerHandle | None = None
        self.flights: dict[int, Flight] = {}
        self._of: dict[Job, Flight] = {}
        self._given_up: set[int] = set()  # batches whose answers, should they come, are dropped
        self._slow: set[Job] = set()  # their clients are slower than the worker

    @property
    def batches(self) -> int:
        return len(self.flights)

    @property
    def suspected(self) -> bool:
        return bool(self.quarantine)

    # What the owner calls

    def send(self, jobs: list[Job], now: float, deaths: int = 0) -> None:
        assert self._transport is not None
        if not self.sent:
            self.began = now
            self.sent.append(SentBatch(0, [], now, 0, now, b""))
        buffers: list[wire.Buffer] = []
        for job in jobs:
            batch = self._next_batch = (self._next_batch + 1) & 0xFFFFFFFF
            self.flights[batch] = self._of[job] = Flight(batch, job, now, deaths, now)
            self.sent[0].jobs.append(job)
            buffers += wire.encode_fields(wire.Kind.BATCH, batch, [0], [job.meta, job.body])
        self._transport.writelines(buffers)
        if deaths:
            self.quarantine.update(jobs)
            if self._quarantine_over is not None:
                self._quarantine_over.cancel()
            self._quarantine_over = asyncio.get_running_loop().call_later(
                QUARANTINE, self._end_quarantine
            )

    def cancel(self, job: Job) -> None:
        """Tell the worker that no client waits for this answer any more.

        The worker still closes it with a reply.
        """
        flight = self._of.get(job)
        if flight is not None and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(wire.encode(wire.Kind.CANCEL, flight.batch))
            self.release(job)

    def holds(self, job: Job) -> bool:
        flight = self._of.get(job)
        return flight is not None and not flight.streaming

    def overdue(self, before: float) -> list[Job]:
        """Those of which nothing was heard since `before`.

        Their places are free; what still comes of them is thrown away.
        """
        late = [flight for flight in self.flights.values() if flight.last <= before]
        for flight in late:
            self.cancel(flight.job)
            self._given_up.add(flight.batch)
            self._land(flight)
        return [flight.job for flight in late]

    def earliest(self) -> float | None:
        """When the one that was heard of least lately was."""
        return min([flight.last for flight in self.flights.values()], default=None)

    def hold(self, job: Job) -> None:
        self._slow.add(job)

    def release(self, job: Job) -> None:
        self._slow.discard(job)
        flight = self._of.get(job)
        if flight is not None:
            flight.ahead = 0
        if job in self._held:
            super().release(job)
            for (
                each
            ) in self.flights.values():  # nothing was read meanwhile, so that time does not count
                each.last = max(each.last, self.began)

    # What the event loop calls

    def connection_lost(self, exc: Exception | None) -> None:
        if self._quarantine_over is not None:
            self._quarantine_over.cancel()
        self.streaming = {
            position
            for position, job in enumerate(self.sent[0].jobs if self.sent else [])
            if self._of[job].streaming
        }
        super().connection_lost(exc)
        self.flights.clear()  # what was under way is in `sent`, for the supervisor
        self._of.clear()

    def _on_frame(self, frame: wire.Frame) -> None:
        if frame.kind is wire.Kind.REPLY:
            self._on_reply(frame)
        elif frame.kind is wire.Kind.PIECE:
            self._on_piece(frame)
        else:
            super()._on_frame(frame)

    def _on_reply(self, frame: wire.Frame) -> None:
        self.began = time.monotonic()
        flight = self.flights.get(frame.batch)
        if flight is None:
            if frame.batch not in self._given_up:
                raise wire.FrameError(
                    f"an answer for batch {frame.batch}, which is not in progress"
                )
            self._given_up.discard(frame.batch)
            return
        if len(frame.items) != 1:
            raise wire.FrameError(f"{len(frame.items)} answers for a request")
        check_extra(frame)
        self._land(flight)
        self.answered += 1
        self.owner.on_reply(
            self,
            SentBatch(
                flight.batch,
                [flight.job],
                flight.at,
                flight.deaths,
                flight.at,
                arrivals([flight.job]),
            ),
            frame,
        )

    def _on_piece(self, frame: wire.Frame) -> None:
        self.began = now = time.monotonic()
        self._pieces += len(frame.items)
        flight = self.flights.get(frame.batch)
        if flight is None:  # a thread of the handler's goes on with an answer that is complete
            return
        flight.last = now
        flight.streaming = True
        if flight.job in self.quarantine:
            self.quarantine.discard(flight.job)
            if not self.quarantine:
                self._end_quarantine()
        for _, meta, body in frame.items:
            flight.job.piece(self.owner.on_begun(flight.job, meta) if meta else meta, body, self)
            if flight.job in self._slow:
                flight.ahead += len(body)
                if flight.ahead > HELD_MOST and flight.job not in self._held:
                    super().hold(flight.job)

    def _end_quarantine(self) -> None:
        if self._quarantine_over is not None:
            self._quarantine_over.cancel()
            self._quarantine_over = None
        self.quarantine.clear()
        self.owner.on_proven()

    def _land(self, flight: Flight) -> None:
        self.quarantine.discard(flight.job)
        del self.flights[flight.batch]
        del self._of[flight.job]
        self.sent[0].jobs.remove(flight.job)
        if not self.flights:
            self.sent.clear()
            if self._drained is not None:
                self._drained.set_result(None)
                self._drained = None
