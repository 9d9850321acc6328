"""Dispatch for stateful models: one worker runs the requests of a sequence, one by one.

`sequences.py` makes the decisions.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection, Iterable

from tsx_runtime import wire
from tsx_runtime.core.scheduling.channel import Channel, SentBatch
from tsx_runtime.core.scheduling.continuous import JoiningDispatcher
from tsx_runtime.core.scheduling.dispatcher import NO_WORKER, Bounds, Dispatcher
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.core.scheduling.sequences import (
    MAX_ID_CHARS,
    Refusal,
    SequenceConfig,
    SequenceMark,
    Sequences,
)
from tsx_runtime.errors import BadRequest, TsxError, Unavailable

NOT_BEGUN = (
    "Its sequence did not start: the client of its first request disconnected, or its deadline"
    " passed. Start a new sequence."
)


class SequenceDispatcher(Dispatcher):
    """The dispatcher of a stateful model.

    A worker that ends takes its sequences with it: the next request of each is refused with the
    reason. A request is never run twice, since its first run may have changed the state.
    """

    no_worker_message = (
        f"{NO_WORKER} If this is a sequence inference, please check if it is closed, or expired; or"
        " exceeds maxSequenceJobQueueSize"
    )
    joins = False  # whether requests join running ones in a worker

    def __init__(
        self, label: str, limits: BatchLimits, bounds: Bounds, config: SequenceConfig
    ) -> None:
        super().__init__(label, limits, bounds)
        self.sequences: Sequences[Channel] = Sequences(config)
        # Jobs with a generated sequence id, which is sent to the client.
        self._generated: set[Job] = set()
        self._none_active = asyncio.Event()  # set when there may be no sequence any more
        # Channels that serve their present sequences, but no new one.
        self._leaving: dict[Channel, asyncio.Event] = {}

    @property
    def pending(self) -> int:
        return len(self.sequences)

    def submit(self, job: Job) -> None:
        mark = read_mark(job.meta)
        if not self.accepting and not self.wake():
            self._reject(job, self._no_worker())
        elif len(mark.id) > MAX_ID_CHARS:
            self._reject(
                job,
                BadRequest(
                    f"The sequence's id has {len(mark.id)} characters; the limit is {MAX_ID_CHARS}."
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
            self._admit(job, mark)

    def has_sequence_of(self, job: Job) -> bool:
        return self.sequences.knows(read_mark(job.meta).id)

    def runs_sequence_of(self, job: Job) -> bool:
        """Tell whether a job belongs to a running sequence."""
        return self.sequences.is_active(read_mark(job.meta).id)

    @property
    def unused(self) -> bool:
        return super().unused and not self.sequences.active

    async def wait_drained(self) -> None:
        while self.sequences.active:
            self._none_active.clear()
            await self._none_active.wait()
        await self.wait_idle()

    def leave(self, job: Job) -> None:
        self.sequences.some_left = True
        super().leave(job)

    def remove(self, channel: Channel) -> None:
        super().remove(channel)
        self._refuse_each(
            self.sequences.lost(
                channel, "is over: the worker that held its state was removed. Start a new sequence"
            )
        )
        self._notify_released()

    async def release(self, channel: Channel) -> None:
        """Release a process that has a successor.

        Sequences stay with the process that has their state until they are over.
        """
        if self.sequences.held_by(channel):
            over = self._leaving[channel] = asyncio.Event()
            await over.wait()
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
        end = f"\r\n{wire.SEQUENCE_END}: "
        for job, (_, headers, _) in zip(sent.jobs, frame.items, strict=True):
            header_text = f"\r\n{str(headers, 'latin-1').lower()}" if headers else ""
            self._refuse_each(self.sequences.answered(job, now, last=end in header_text))
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
        self._refuse_each(
            self.sequences.lost(
                channel, "is over: the worker that held its state has died. Start a new sequence"
            )
        )
        self._notify_released()
        super().on_closed(channel)

    def _admit(self, job: Job, mark: SequenceMark) -> None:
        now = time.monotonic()
        self._refuse_each(self.sequences.expire(now))
        made_up = not mark.id  # TorchServe does the same.
        if made_up:
            mark = mark._replace(id=f"ts-seq-{uuid.uuid4()}")
            start = "" if mark.start else f"{wire.SEQUENCE_START}: true\r\n"
            job.meta += f"{wire.SEQUENCE_ID}: {mark.id}\r\n{start}".encode("latin-1")
        reason = self.sequences.admit(job, mark, now)
        if reason is not None:
            self._reject(job, self._refusal(f"{reason}."))
            return
        if not self._open:
            self._idle.clear()
        self._open += 1
        if job.deadline is not None:
            self._watch_deadline(job, job.deadline)
        if made_up:
            self._generated.add(job)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self, at_least: float = 0.0) -> None:
        self._flush_due = False
        now = max(time.monotonic(), at_least)
        sequences = self.sequences
        if sequences.some_left or sequences.earliest <= now:
            for job in sequences.drop_over(now):
                over = job.gone or (job.deadline is not None and job.deadline <= now)
                self._refuse(job, self._gone_or_late(job) if over else self._refusal(NOT_BEGUN))
        self._refuse_each(sequences.expire(now))
        self._notify_released()
        workers = [
            *self.channels,
            *(channel for channel in self._leaving if channel not in self.channels),
        ]
        batches = sequences.assign(
            workers, now, self.limits, joining=self.joins, leaving=self._leaving
        )
        for channel, jobs in batches:
            channel.send(jobs, now)
        if batches:
            self._on_sent()
        if (wake := min(sequences.next_end, sequences.earliest)) < self._timer_at:
            self._set_timer(wake, now)

    def _on_sent(self) -> None:
        """React to a batch that was sent (a hook for subclasses)."""

    def _with_id(self, job: Job, headers: wire.Buffer) -> wire.Buffer:
        """Add a generated sequence id to the first answer, unless the handler does."""
        if job not in self._generated:
            return headers
        self._generated.discard(job)
        if f"\r\n{wire.SEQUENCE_ID}: " in f"\r\n{str(headers, 'latin-1').lower()}":
            return headers
        return bytes(headers) + f"{wire.SEQUENCE_ID}: {read_mark(job.meta).id}\r\n".encode(
            "latin-1"
        )

    def _refuse_each(self, refusals: Iterable[Refusal]) -> None:
        for job, reason in refusals:
            self._refuse(job, self._refusal(f"{reason}."))

    def _refuse(self, job: Job, error: TsxError) -> None:
        self._generated.discard(job)
        self._refuse_each(self.sequences.answered(job, time.monotonic()))
        super()._refuse(job, error)

    def _refuse_running(self, job: Job) -> None:
        self._generated.discard(job)
        super()._refuse_running(job)

    def _refusal(self, reason: str) -> Unavailable:
        return Unavailable(f"{self._no_worker().message}. {reason}")

    def _notify_released(self) -> None:
        for channel in [
            channel for channel in self._leaving if not self.sequences.held_by(channel)
        ]:
            self._leaving.pop(channel).set()
        if not self.sequences.active:
            self._none_active.set()


class JoiningSequenceDispatcher(SequenceDispatcher, JoiningDispatcher):
    """A dispatcher of sequences whose workers let requests join running ones.

    With continuous batching these may be of a sequence whose answers are streaming.
    """

    joins = True

    def _on_sent(self) -> None:
        self._watch_answers()

    def on_begun(self, job: Job, headers: wire.Buffer) -> wire.Buffer:
        if self.sequences.begun(job) and not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)
        return super().on_begun(job, headers)


def read_mark(meta: wire.Buffer) -> SequenceMark:
    """Return the sequence headers of a request; the id is empty without one."""
    headers = {
        name.lower(): value
        for name, value in wire.parse_header_block(wire.parse_request_meta(meta)[2])
    }
    id = headers.get(wire.SEQUENCE_ID, "")
    start = headers.get(wire.SEQUENCE_START, "").lower() == "true"
    end = headers.get(wire.SEQUENCE_END, "").lower() == "true"
    return SequenceMark(id, start, end)
