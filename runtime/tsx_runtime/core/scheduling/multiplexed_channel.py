"""The channel of a worker whose requests join running ones and are answered in any order.

Each request is a batch of its own. A slow client must not delay the others: the worker's frames are
read until `MAX_HELD_BYTES` of its answer wait. Beyond that, nothing is read from the worker until
the client has read them or is closed (`write_timeout`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tsx_runtime import wire
from tsx_runtime.core.scheduling.channel import (
    Channel,
    Owner,
    SentBatch,
    check_extra,
    pack_arrivals,
)
from tsx_runtime.core.scheduling.job import Job

MAX_HELD_BYTES = 4 << 20  # unread bytes of one streamed answer before all answers wait
# Seconds. Most requests that kill a worker do so at once, or later if the machine is busy.
QUARANTINE_S = 2.0


@dataclass(eq=False, slots=True)
class Flight:
    """A request that a worker is running."""

    batch: int
    job: Job
    sent_at: float
    deaths: int
    last_activity: float  # time.monotonic() of sending, or of the last piece of the answer
    streaming: bool = False
    buffered_bytes: int = 0  # bytes of its answer since its client was found to be slow


class MultiplexedChannel(Channel):
    """A `Channel` whose `sent` has at most one entry, with all running requests.

    `began` is the time of the worker's last frame. Requests with which a worker died are in
    quarantine until each of them has begun to be answered, or `QUARANTINE_S` has passed.
    """

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self.quarantine: set[Job] = set()
        self._quarantine_timer: asyncio.TimerHandle | None = None
        self.flights: dict[int, Flight] = {}
        self._flight_of: dict[Job, Flight] = {}
        self._abandoned: set[int] = set()  # batches whose late answers are dropped
        self._slow_clients: set[Job] = set()  # jobs whose clients are slow, paused or not

    @property
    def batches(self) -> int:
        return len(self.flights)

    @property
    def has_suspects(self) -> bool:
        return bool(self.quarantine)

    # The methods below are called by the owner.

    def send(self, jobs: list[Job], now: float, deaths: int = 0) -> None:
        assert self._transport is not None
        if not self.sent:
            self.began = now
            self.sent.append(SentBatch(0, [], now, 0, now, b""))
        buffers: list[wire.Buffer] = []
        for job in jobs:
            batch = self._next_batch = (self._next_batch + 1) & 0xFFFFFFFF
            self.flights[batch] = self._flight_of[job] = Flight(batch, job, now, deaths, now)
            self.sent[0].jobs.append(job)
            buffers += wire.encode_fields(wire.Kind.BATCH, batch, [0], [job.meta, job.body])
        self._transport.writelines(buffers)
        if deaths:
            self.quarantine.update(jobs)
            if self._quarantine_timer is not None:
                self._quarantine_timer.cancel()
            self._quarantine_timer = asyncio.get_running_loop().call_later(
                QUARANTINE_S, self._end_quarantine
            )

    def cancel(self, job: Job) -> None:
        """Tell the worker that no client waits for an answer.

        The worker still ends it with a REPLY frame.
        """
        flight = self._flight_of.get(job)
        if flight is not None and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(wire.encode(wire.Kind.CANCEL, flight.batch))
            self.release(job)

    def holds(self, job: Job) -> bool:
        flight = self._flight_of.get(job)
        return flight is not None and not flight.streaming

    def pop_overdue(self, before: float) -> list[Job]:
        """Remove and return jobs without an answer or a piece since `before`.

        Other requests may take their places; their late answers are dropped.
        """
        overdue_flights = [
            flight for flight in self.flights.values() if flight.last_activity <= before
        ]
        for flight in overdue_flights:
            self.cancel(flight.job)
            self._abandoned.add(flight.batch)
            self._remove_flight(flight)
        return [flight.job for flight in overdue_flights]

    def oldest_activity(self) -> float | None:
        """Return the oldest time of a running request's last piece, or of its sending."""
        return min([flight.last_activity for flight in self.flights.values()], default=None)

    def hold(self, job: Job) -> None:
        self._slow_clients.add(job)

    def release(self, job: Job) -> None:
        self._slow_clients.discard(job)
        flight = self._flight_of.get(job)
        if flight is not None:
            flight.buffered_bytes = 0
        if job in self._slow_jobs:
            super().release(job)
            # While reading was paused, no request could make progress.
            for running_flight in self.flights.values():
                running_flight.last_activity = max(running_flight.last_activity, self.began)

    # The methods below are called by the event loop.

    def connection_lost(self, exc: Exception | None) -> None:
        if self._quarantine_timer is not None:
            self._quarantine_timer.cancel()
        self.streaming = {
            position
            for position, job in enumerate(self.sent[0].jobs if self.sent else [])
            if self._flight_of[job].streaming
        }
        super().connection_lost(exc)
        self.flights.clear()  # `sent` still has the running jobs, for the supervisor.
        self._flight_of.clear()

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
            if frame.batch not in self._abandoned:
                raise wire.FrameError(
                    f"an answer for batch {frame.batch}, which is not in progress"
                )
            self._abandoned.discard(frame.batch)
            return
        if len(frame.items) != 1:
            raise wire.FrameError(f"{len(frame.items)} answers for a request")
        check_extra(frame)
        self._remove_flight(flight)
        self.answered += 1
        self.owner.on_reply(
            self,
            SentBatch(
                flight.batch,
                [flight.job],
                flight.sent_at,
                flight.deaths,
                flight.sent_at,
                pack_arrivals([flight.job]),
            ),
            frame,
        )

    def _on_piece(self, frame: wire.Frame) -> None:
        self.began = now = time.monotonic()
        self._pieces += len(frame.items)
        flight = self.flights.get(frame.batch)
        if flight is None:  # A thread of the handler still sends pieces of a complete answer.
            return
        flight.last_activity = now
        flight.streaming = True
        if flight.job in self.quarantine:
            self.quarantine.discard(flight.job)
            if not self.quarantine:
                self._end_quarantine()
        for _, meta, body in frame.items:
            flight.job.piece(self.owner.on_begun(flight.job, meta) if meta else meta, body, self)
            if flight.job in self._slow_clients:
                flight.buffered_bytes += len(body)
                if flight.buffered_bytes > MAX_HELD_BYTES and flight.job not in self._slow_jobs:
                    super().hold(flight.job)

    def _end_quarantine(self) -> None:
        if self._quarantine_timer is not None:
            self._quarantine_timer.cancel()
            self._quarantine_timer = None
        self.quarantine.clear()
        self.owner.on_proven()

    def _remove_flight(self, flight: Flight) -> None:
        self.quarantine.discard(flight.job)
        del self.flights[flight.batch]
        del self._flight_of[flight.job]
        self.sent[0].jobs.remove(flight.job)
        if not self.flights:
            self.sent.clear()
            if self._drained is not None:
                self._drained.set_result(None)
                self._drained = None
