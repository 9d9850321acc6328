"""Dispatch for stateful models: one worker runs all requests of a sequence, one by one.

`sequences.py` makes the decisions.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection, Iterable

from tsx_runtime import wire
from tsx_runtime.core.scheduling.channel import Channel, SentBatch
from tsx_runtime.core.scheduling.dispatcher import NO_WORKER, Bounds, Dispatcher
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.joining import JoiningDispatcher
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.core.scheduling.strategies import SequenceConfig
from tsx_runtime.errors import BadRequest, TsxError, Unavailable
from tsx_runtime.features.sequences.sequences import (
    MAX_ID_CHARS,
    Refusal,
    SequenceHeaders,
    Sequences,
)

NOT_STARTED = (
    "Its sequence did not start: the client of its first request disconnected, or its deadline"
    " passed. Start a new sequence."
)


class SequenceDispatcher(Dispatcher):
    """The dispatcher of a stateful model.

    If a worker ends, its sequences are lost: the next request of each is refused with the reason. A
    request is never run twice, since its first run may have changed the state.
    """

    no_worker_message = (
        f"{NO_WORKER} If this is a sequence inference, please check if it is closed, or expired; or"
        " exceeds maxSequenceJobQueueSize"
    )
    joins_running = False  # whether requests join running ones in a worker

    def __init__(
        self, label: str, limits: BatchLimits, bounds: Bounds, config: SequenceConfig
    ) -> None:
        super().__init__(label, limits, bounds)
        self.sequences: Sequences[Channel] = Sequences(config)
        # Jobs with a generated sequence id, which the client still has to learn.
        self._generated: set[Job] = set()
        self._none_active = asyncio.Event()  # set when no sequence may be active any more
        # Channels that serve only the sequences that they have.
        self._draining: dict[Channel, asyncio.Event] = {}

    @property
    def pending(self) -> int:
        return len(self.sequences)

    def submit(self, job: Job) -> None:
        headers = read_sequence_headers(job.meta)
        if not self.accepting and not self.wake():
            self._reject(job, self._no_worker())
        elif len(headers.id) > MAX_ID_CHARS:
            self._reject(
                job,
                BadRequest(
                    f"The sequence's id has {len(headers.id)} characters; the limit is"
                    f" {MAX_ID_CHARS}."
                ),
            )
        elif self.sequences.size and self.sequences.size + len(job.body) > self.bounds.size:
            self._reject(
                job,
                self._refusal(
                    f"The queue is full: requests with {self.sequences.size} bytes wait"
                    " (maxQueueBytes)."
                ),
            )
        else:
            self._admit(job, headers)

    def has_sequence_of(self, job: Job) -> bool:
        return self.sequences.knows(read_sequence_headers(job.meta).id)

    def runs_sequence_of(self, job: Job) -> bool:
        return self.sequences.is_active(read_sequence_headers(job.meta).id)

    def share_losses(self, old: Dispatcher) -> None:
        if isinstance(old, SequenceDispatcher):
            self.sequences.share_losses(old.sequences)

    @property
    def is_unused(self) -> bool:
        return super().is_unused and not self.sequences.active

    async def wait_drained(self) -> None:
        while self.sequences.active:
            self._none_active.clear()
            await self._none_active.wait()
        await self.wait_idle()

    def leave(self, job: Job) -> None:
        self.sequences.some_clients_left = True
        super().leave(job)

    def remove(self, channel: Channel) -> None:
        super().remove(channel)
        self._refuse_with_reasons(
            self.sequences.on_worker_lost(
                channel, "is over: the worker that held its state was removed. Start a new sequence"
            )
        )
        self._notify_released()

    async def release(self, channel: Channel) -> None:
        """Release a process that has a successor.

        Sequences stay with the process that has their state until they end.
        """
        if self.sequences.held_by(channel):
            released = self._draining[channel] = asyncio.Event()
            await released.wait()
        await super().release(channel)

    def refuse_waiting(self, error: TsxError) -> None:
        self.refuse_all(
            [
                job
                for job, _ in self.sequences.drop_all(
                    "is over: no worker served the model. Start a new sequence"
                )
            ],
            error,
        )
        self._notify_released()

    def retry_lost(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        self.refuse_all(lost.jobs, error)

    def requeue(self, lost: SentBatch, streaming: Collection[int], error: TsxError) -> None:
        self.refuse_all(lost.jobs, error)

    def on_reply(self, channel: Channel, sent: SentBatch, frame: wire.Frame) -> None:
        now = time.monotonic()
        end_header = f"\r\n{wire.SEQUENCE_END}: "
        for job, (_, headers, _) in zip(sent.jobs, frame.items, strict=True):
            header_text = f"\r\n{str(headers, 'latin-1').lower()}" if headers else ""
            self._refuse_with_reasons(
                self.sequences.on_answered(job, now, last=end_header in header_text)
            )
        if not self._generated.isdisjoint(sent.jobs):
            pairs = zip(sent.jobs, frame.items, strict=True)
            frame = frame._replace(
                items=[
                    (status, self._with_id(job, headers), body)
                    for job, (status, headers, body) in pairs
                ]
            )
        self._notify_released()
        super().on_reply(channel, sent, frame)

    def on_begun(self, job: Job, headers: wire.Buffer) -> wire.Buffer:
        return self._with_id(job, super().on_begun(job, headers))

    def on_closed(self, channel: Channel) -> None:
        self._refuse_with_reasons(
            self.sequences.on_worker_lost(
                channel, "is over: the worker that held its state has died. Start a new sequence"
            )
        )
        self._notify_released()
        super().on_closed(channel)

    def _admit(self, job: Job, headers: SequenceHeaders) -> None:
        now = time.monotonic()
        self._refuse_with_reasons(self.sequences.expire(now))
        is_generated = not headers.id  # TorchServe generates ids, too.
        if is_generated:
            headers = headers._replace(id=f"ts-seq-{uuid.uuid4()}")
            start = "" if headers.start else f"{wire.SEQUENCE_START}: true\r\n"
            job.meta += f"{wire.SEQUENCE_ID}: {headers.id}\r\n{start}".encode("latin-1")
        reason = self.sequences.admit(job, headers, now)
        if reason is not None:
            self._reject(job, self._refusal(f"{reason}."))
            return
        if not self._open_jobs:
            self._idle.clear()
        self._open_jobs += 1
        if job.deadline is not None:
            self._watch_deadline(job, job.deadline)
        if is_generated:
            self._generated.add(job)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self, min_now: float = 0.0) -> None:
        self._flush_due = False
        now = max(time.monotonic(), min_now)
        sequences = self.sequences
        if sequences.some_clients_left or sequences.earliest_deadline <= now:
            for job in sequences.drop_expired(now):
                is_expired = job.gone or (job.deadline is not None and job.deadline <= now)
                self._refuse(
                    job, self._skip_error(job) if is_expired else self._refusal(NOT_STARTED)
                )
        self._refuse_with_reasons(sequences.expire(now))
        self._notify_released()
        workers = [
            *self.channels,
            *(channel for channel in self._draining if channel not in self.channels),
        ]
        batches = sequences.assign(
            workers, now, self.limits, joining=self.joins_running, leaving=self._draining
        )
        for channel, jobs in batches:
            channel.send(jobs, now)
        if batches:
            self._on_sent()
        if (wake_at := min(sequences.next_end, sequences.earliest_deadline)) < self._timer_at:
            self._set_timer(wake_at, now)

    def _on_sent(self) -> None:
        """React to batches that were sent (a hook for subclasses)."""

    def _with_id(self, job: Job, headers: wire.Buffer) -> wire.Buffer:
        """Add a generated sequence id to its first answer's headers, unless the handler does."""
        if job not in self._generated:
            return headers
        self._generated.discard(job)
        if f"\r\n{wire.SEQUENCE_ID}: " in f"\r\n{str(headers, 'latin-1').lower()}":
            return headers
        return bytes(
            headers
        ) + f"{wire.SEQUENCE_ID}: {read_sequence_headers(job.meta).id}\r\n".encode("latin-1")

    def _refuse_with_reasons(self, refusals: Iterable[Refusal]) -> None:
        for job, reason in refusals:
            self._refuse(job, self._refusal(f"{reason}."))

    def _refuse(self, job: Job, error: TsxError) -> None:
        self._generated.discard(job)
        self._refuse_with_reasons(self.sequences.on_answered(job, time.monotonic()))
        super()._refuse(job, error)

    def _refuse_running(self, job: Job) -> None:
        self._generated.discard(job)
        super()._refuse_running(job)

    def _refusal(self, reason: str) -> Unavailable:
        return Unavailable(f"{self._no_worker().message}. {reason}")

    def _notify_released(self) -> None:
        for channel in [
            channel for channel in self._draining if not self.sequences.held_by(channel)
        ]:
            self._draining.pop(channel).set()
        if not self.sequences.active:
            self._none_active.set()


class JoiningSequenceDispatcher(SequenceDispatcher, JoiningDispatcher):
    """A dispatcher of sequences whose workers let requests join running ones.

    With continuous batching, a request may also join an earlier one of its own sequence, while that
    one's answer is streaming.
    """

    joins_running = True

    def _on_sent(self) -> None:
        self._watch_answers()

    def on_begun(self, job: Job, headers: wire.Buffer) -> wire.Buffer:
        if self.sequences.on_begun(job) and not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)
        return super().on_begun(job, headers)


def read_sequence_headers(meta: wire.Buffer) -> SequenceHeaders:
    """Return the sequence headers of a request; the id is empty if there is none."""
    headers = {
        name.lower(): value
        for name, value in wire.parse_header_block(wire.parse_request_meta(meta)[2])
    }
    id = headers.get(wire.SEQUENCE_ID, "")
    start = headers.get(wire.SEQUENCE_START, "").lower() == "true"
    end = headers.get(wire.SEQUENCE_END, "").lower() == "true"
    return SequenceHeaders(id, start, end)
