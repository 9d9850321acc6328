"""The sequences of a stateful model: their requests, their worker, and their end.

All decisions are without I/O and without a clock. docs/reference/torchserve.md has TorchServe's
rules.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeAlias

from tsx_runtime.core.scheduling.batching import SlotT
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, urgency
from tsx_runtime.core.scheduling.strategies import SequenceConfig

MAX_LOST = 4096  # lost sequences that are remembered with the reason, for their clients
MAX_ID_CHARS = 512  # Clients choose ids, which must not fill the memory.
MAX_STALE_ENTRIES = 64  # entries of ended sequences in the heap before it is rebuilt
MAX_EXPIRED = 1000  # sequences that `expire` ends in one call
CLOSED = "is closed"


Refusal: TypeAlias = tuple[Job, str]  # a waiting request, and the reason for refusing it


class SequenceHeaders(NamedTuple):
    """The sequence headers of a request."""

    id: str
    start: bool
    end: bool


class ActiveSequence(Generic[SlotT]):
    """One sequence. Its requests are answered by the same worker, one after the other.

    With `overlap`, a request may run while earlier ones still stream.
    """

    __slots__ = (
        "began",
        "ending",
        "id",
        "last_activity",
        "next_check",
        "running",
        "streams",
        "waiting",
        "worker",
    )

    def __init__(self, id: str, now: float) -> None:
        self.id = id
        self.worker: SlotT | None = None  # set when the first request is sent
        self.waiting: deque[Job] = deque()
        self.running: Job | None = None
        # Jobs that stream their answers while others may be sent (only with `overlap`).
        self.streams: set[Job] = set()
        self.began = now
        self.last_activity = now  # time of the last request, or of its answer
        self.ending = False  # whether a request with the end header has come
        self.next_check = NEVER  # time of the next check whether it must end

    @property
    def ready(self) -> bool:
        return self.running is None and bool(self.waiting)

    @property
    def busy(self) -> bool:
        return self.running is not None or bool(self.streams)


class Sequences(Generic[SlotT]):
    """The active sequences of one version.

    A sequence ends when its last request is answered, after `max_idle` without a request, `timeout`
    after its start, or with the worker that has its state. Its waiting requests are then returned
    as refusals.

    A call takes longer the more requests wait, whatever the number of sequences.
    """

    def __init__(self, config: SequenceConfig) -> None:
        self.config = config
        self.size = 0  # bytes of waiting bodies
        # Whether a client may have left since the last `drop_expired`.
        self.some_clients_left = False
        self.earliest_deadline = NEVER  # lower limit of the waiting requests' deadlines
        self._sequences: dict[str, ActiveSequence[SlotT]] = {}
        self._sequence_by_job: dict[Job, ActiveSequence[SlotT]] = {}  # sequences of all jobs
        self._queued: dict[ActiveSequence[SlotT], None] = {}  # sequences with waiting requests
        # Sequences with jobs in `streams`.
        self._streaming: dict[ActiveSequence[SlotT], None] = {}
        # The number of sequences by the worker that has their state.
        self._count_by_worker: Counter[SlotT] = Counter()
        # A heap of the times of checks whether a sequence must end.
        self._checks: list[tuple[float, int, ActiveSequence[SlotT]]] = []
        self._entries = itertools.count()  # These numbers make all entries of the heap comparable.
        # The reasons why sequences were lost, by id.
        self._loss_reasons: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum(len(sequence.waiting) for sequence in self._queued)

    @property
    def active(self) -> int:
        return len(self._sequences)

    @property
    def next_end(self) -> float:
        """The earliest time at which a sequence may have to end."""
        return self._checks[0][0] if self._checks else NEVER

    def held_by(self, worker: SlotT) -> int:
        """Return the number of sequences whose state is in this worker."""
        return self._count_by_worker[worker]

    def knows(self, id: str) -> bool:
        """Tell whether a sequence is active, or was lost and its client does not know it yet."""
        return id in self._sequences or id in self._loss_reasons

    def is_active(self, id: str) -> bool:
        return id in self._sequences

    def share_losses(self, old: Sequences[SlotT]) -> None:
        """Share the record of lost sequences with a replaced version.

        If a client continues a sequence that the replaced version has lost, it gets the error here.
        """
        self._loss_reasons.update(old._loss_reasons)
        old._loss_reasons = self._loss_reasons
        while len(self._loss_reasons) > MAX_LOST:
            self._loss_reasons.popitem(last=False)

    def admit(self, job: Job, headers: SequenceHeaders, now: float) -> str | None:
        """Accept a request, or return the reason against it.

        The first request with an id starts a sequence, even without the start header. But if a
        sequence with this id was lost, one request that continues it gets an error.
        """
        sequence = self._sequences.get(headers.id)
        if sequence is None:
            loss_reason = self._loss_reasons.pop(headers.id, None)
            if loss_reason is not None and not headers.start:
                return f"Sequence {headers.id} {loss_reason}"
            if len(self._sequences) >= self.config.max_sequences:
                return (
                    f"{len(self._sequences)} sequences are active, which is the limit"
                    " (maxNumSequence)"
                )
            sequence = self._sequences[headers.id] = ActiveSequence(headers.id, now)
        elif sequence.ending:
            return f"Sequence {headers.id} is closed: an earlier request ended it"
        elif self.config.timeout is not None and now >= sequence.began + self.config.timeout:
            return (
                f"Sequence {headers.id} is over: it was started more than {self.config.timeout:g} s"
                " ago (sequenceTimeoutMSec)"
            )
        elif len(sequence.waiting) >= self.config.max_waiting:
            return (
                f"{len(sequence.waiting)} requests of sequence {headers.id} wait, which is the"
                " limit (maxSequenceJobQueueSize)"
            )
        sequence.last_activity = now
        sequence.ending = headers.end
        sequence.waiting.append(job)
        self._queued[sequence] = None
        self._watch(sequence)
        self._sequence_by_job[job] = sequence
        self.size += len(job.body)
        if job.deadline is not None:
            self.earliest_deadline = min(self.earliest_deadline, job.deadline)
        return None

    def assign(
        self,
        workers: Sequence[SlotT],
        now: float,
        limits: BatchLimits,
        *,
        joining: bool = False,
        leaving: Collection[SlotT] = (),
    ) -> list[tuple[SlotT, list[Job]]]:
        """Take out the requests to send now: one request of each sequence at a time.

        An idle worker has room for `limits.max_items` requests. If requests are `joining` running
        ones, a worker has room while it runs fewer sequences than that; a sequence that already
        streams needs no further room.

        The most urgent request goes first. A sequence goes to the worker that has its state. A new
        sequence goes to the worker with room and the fewest sequences, but not to a `leaving` one.
        """
        if joining:
            free_places = {worker: limits.max_items - worker.batches for worker in workers}
            for sequence in self._streaming:
                if sequence.worker in free_places:
                    free_places[sequence.worker] += len(sequence.streams) - (
                        sequence.running is None
                    )
        else:
            free_places = {worker: 0 if worker.batches else limits.max_items for worker in workers}
        if all(count <= 0 for count in free_places.values()) and not self._streaming:
            return []
        free_bytes = dict.fromkeys(workers, limits.max_bytes)
        sequence_counts = {
            worker: self.held_by(worker) for worker in workers if worker not in leaving
        }
        batches: dict[SlotT, list[Job]] = {}
        ready = [
            sequence
            for sequence in self._queued
            if sequence.ready and len(sequence.streams) <= self.config.max_waiting
        ]
        for sequence in sorted(ready, key=_head):
            job, worker = sequence.waiting[0], sequence.worker
            if worker is None:
                candidates = [worker for worker in sequence_counts if free_places[worker] > 0]
                if not candidates:
                    continue
                worker = min(candidates, key=lambda worker: sequence_counts[worker])
            if worker not in free_places or (free_places[worker] <= 0 and not sequence.streams):
                continue
            if worker in batches and not joining and len(job.body) > free_bytes[worker]:
                continue
            if sequence.worker is None:
                sequence.worker = worker
                sequence_counts[worker] += 1
                self._count_by_worker[worker] += 1
            sequence.waiting.popleft()
            if not sequence.waiting:
                del self._queued[sequence]
            sequence.running = job
            self.size -= len(job.body)
            free_places[worker] -= not sequence.streams
            free_bytes[worker] -= len(job.body)
            batches.setdefault(worker, []).append(job)
        return list(batches.items())

    def on_begun(self, job: Job) -> bool:
        """Note that an answer begins to stream; tell whether another request may be sent."""
        sequence = self._sequence_by_job.get(job)
        if not self.config.overlap or sequence is None or sequence.running is not job:
            return False
        sequence.running = None
        sequence.streams.add(job)
        self._streaming[sequence] = None
        return bool(sequence.waiting)

    def on_answered(self, job: Job, now: float, *, last: bool = False) -> list[Refusal]:
        """Note that a request is answered or refused; the `last` one ends its sequence."""
        sequence = self._sequence_by_job.pop(job, None)
        if sequence is None:  # Its sequence has ended before.
            return []
        if sequence.running is job:
            sequence.running = None
        sequence.streams.discard(job)
        if not sequence.streams:
            self._streaming.pop(sequence, None)
        sequence.last_activity = now
        if last or (sequence.ending and not sequence.waiting and not sequence.busy):
            return self._end(sequence, CLOSED)
        self._watch(sequence)
        return []

    def on_worker_lost(self, worker: SlotT, reason: str) -> list[Refusal]:
        """End the sequences whose state was in this worker.

        Returns:
            The waiting requests to refuse, without running ones.
        """
        lost_sequences = [
            sequence for sequence in self._sequences.values() if sequence.worker is worker
        ]
        return [refusal for sequence in lost_sequences for refusal in self._end(sequence, reason)]

    def expire(self, now: float) -> list[Refusal]:
        """End sequences whose time is over, unless they have a running request.

        If there are many, some are left for the next call, so that other work can be done;
        `next_end` is then in the past.
        """
        refusals: list[Refusal] = []
        for _ in range(MAX_EXPIRED):
            if self.next_end > now:
                break
            check_time, _, sequence = heappop(self._checks)
            if (
                check_time != sequence.next_check
                or self._sequences.get(sequence.id) is not sequence
            ):
                continue
            sequence.next_check = NEVER
            if sequence.busy:  # The next check follows the answer.
                continue
            if now >= self._end_of(sequence):
                refusals += self._end(sequence, self._expiry_reason(sequence, now))
            else:
                self._watch(sequence)
        return refusals

    def drop_expired(self, now: float) -> list[Job]:
        """Remove jobs whose client has left or whose deadline has passed.

        Such jobs can exist only if `some_clients_left` is set or `earliest_deadline` has passed. If
        the first request of a sequence is removed, those that follow it are removed too.
        """
        dropped: list[Job] = []
        for sequence in list(self._queued):
            expired = [
                job
                for job in sequence.waiting
                if job.gone or (job.deadline is not None and job.deadline <= now)
            ]
            if expired and sequence.worker is None and expired[0] is sequence.waiting[0]:
                dropped += [job for job, _ in self._end(sequence, CLOSED)]
                continue
            for job in expired:
                del self._sequence_by_job[job]
                sequence.waiting.remove(job)
                self.size -= len(job.body)
            dropped += expired
            if not sequence.waiting:
                del self._queued[sequence]
            if sequence.ending and not sequence.waiting and not sequence.busy:
                self._end(sequence, CLOSED)
            elif expired:
                self._watch(sequence)
        self.some_clients_left = False
        self.earliest_deadline = min(
            (job.deadline for job in self._waiting() if job.deadline is not None), default=NEVER
        )
        return dropped

    def drop_all(self, reason: str) -> list[Refusal]:
        """End all sequences; running requests are still answered."""
        return [
            refusal
            for sequence in list(self._sequences.values())
            for refusal in self._end(sequence, reason)
        ]

    def _watch(self, sequence: ActiveSequence[SlotT]) -> None:
        """Schedule a check for the time at which a sequence may have to end.

        If that time has moved when the check comes, the check is scheduled again.
        """
        end = self._end_of(sequence)
        if end < sequence.next_check:
            sequence.next_check = end
            heappush(self._checks, (end, next(self._entries), sequence))
            # If most entries belong to sequences that have ended, rebuild the heap.
            if len(self._checks) > 2 * len(self._sequences) + MAX_STALE_ENTRIES:
                scheduled = [
                    sequence for sequence in self._sequences.values() if sequence.next_check < NEVER
                ]
                self._checks = [
                    (sequence.next_check, next(self._entries), sequence) for sequence in scheduled
                ]
                heapify(self._checks)

    def _end_of(self, sequence: ActiveSequence[SlotT]) -> float:
        """Return when a sequence ends if nothing else happens.

        While its requests wait for a worker, it is not idle.
        """
        idle_end = NEVER if sequence.waiting else sequence.last_activity + self.config.max_idle
        return (
            idle_end
            if self.config.timeout is None
            else min(idle_end, sequence.began + self.config.timeout)
        )

    def _expiry_reason(self, sequence: ActiveSequence[SlotT], now: float) -> str:
        config = self.config
        if config.timeout is not None and now >= sequence.began + config.timeout:
            return (
                f"is over: it was started more than {config.timeout:g} s ago (sequenceTimeoutMSec)"
            )
        return f"has expired: no request of it came for {config.max_idle:g} s (sequenceMaxIdleMSec)"

    def _end(self, sequence: ActiveSequence[SlotT], reason: str) -> list[Refusal]:
        del self._sequences[sequence.id]
        self._queued.pop(sequence, None)
        if sequence.worker is not None:
            self._count_by_worker[sequence.worker] -= 1
            if not self._count_by_worker[sequence.worker]:
                del self._count_by_worker[sequence.worker]
        jobs = list(sequence.waiting)
        self._streaming.pop(sequence, None)
        for job in [
            *jobs,
            *sequence.streams,
            *([sequence.running] if sequence.running is not None else []),
        ]:
            del self._sequence_by_job[job]
        self.size -= sum(len(job.body) for job in jobs)
        if reason != CLOSED and len(sequence.id) <= MAX_ID_CHARS:
            self._loss_reasons[sequence.id] = reason
            if len(self._loss_reasons) > MAX_LOST:
                self._loss_reasons.popitem(last=False)
        return [(job, f"Sequence {sequence.id} {reason}") for job in jobs]

    def _waiting(self) -> Iterator[Job]:
        return (job for sequence in self._queued for job in sequence.waiting)


def _head(sequence: ActiveSequence[SlotT]) -> tuple[int, float, float]:
    job = sequence.waiting[0]
    return (*urgency(job), job.arrived)
