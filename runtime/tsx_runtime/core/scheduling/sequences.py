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

MAX_LOST = 4096  # lost sequences whose reason is remembered for their clients
MAX_ID_CHARS = 512  # Clients choose ids, which must not fill the memory together.
MAX_STALE_ENTRIES = 64  # entries of ended sequences in the heap before it is rebuilt
MAX_EXPIRED = 1000  # sequences that end in one call
CLOSED = "is closed"


class SequenceConfig(NamedTuple):
    """The sequence settings of a model."""

    max_idle: float  # seconds without a request before a sequence is over
    timeout: float | None = None  # seconds after the start of a sequence; None: no limit
    most: int = 1  # sequences at a time
    queue: int = 1  # waiting requests of a sequence
    # Send a request while earlier ones stream: it may tell the handler to end them.
    overlap: bool = False


Refusal: TypeAlias = tuple[Job, str]  # a request that waited, and the reason of its refusal


class SequenceMark(NamedTuple):
    """The sequence headers of a request."""

    id: str
    start: bool
    end: bool


class Chain(Generic[SlotT]):
    """One sequence. Its requests are answered by the same worker, one after the other.

    If they overlap, one runs beside those that stream.
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
        self.worker: SlotT | None = None  # set when the first request leaves the queue
        self.waiting: deque[Job] = deque()
        self.running: Job | None = None
        # Jobs whose answers have begun, if others may be sent meanwhile.
        self.streams: set[Job] = set()
        self.began = now
        self.last_activity = now  # arrival of the last request, or of its answer
        self.ending = False  # a request has said that it is the last
        self.next_check = NEVER  # the time of the next check whether it is over

    @property
    def ready(self) -> bool:
        return self.running is None and bool(self.waiting)

    @property
    def busy(self) -> bool:
        return self.running is not None or bool(self.streams)


class Sequences(Generic[SlotT]):
    """The active sequences of one version.

    A sequence is over once its last request is answered, after `max_idle` without a request,
    `timeout` after its start, or with the worker that has its state. Its waiting requests are then
    returned as refusals.

    The cost of a request here depends on the number of waiting requests, but not of sequences.
    """

    def __init__(self, config: SequenceConfig) -> None:
        self.config = config
        self.size = 0  # bytes of waiting bodies
        self.some_left = False  # a client may have left since `drop_over` was last called
        self.earliest = NEVER  # lower bound of the waiting requests' deadlines
        self._chains: dict[str, Chain[SlotT]] = {}
        self._chain_of: dict[Job, Chain[SlotT]] = {}  # the sequences of all jobs
        self._queued: dict[Chain[SlotT], None] = {}  # sequences with waiting requests
        # Sequences with requests that stream while others may be sent.
        self._streaming: dict[Chain[SlotT], None] = {}
        self._held: Counter[SlotT] = Counter()  # sequences whose state is in a worker
        # A heap of the times to check whether a sequence is over.
        self._ends: list[tuple[float, int, Chain[SlotT]]] = []
        self._entries = itertools.count()  # numbers of the entries of the heap
        # The reasons by id of lost sequences.
        self._lost: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum(len(chain.waiting) for chain in self._queued)

    @property
    def active(self) -> int:
        return len(self._chains)

    @property
    def next_end(self) -> float:
        """The earliest time at which a sequence may be over."""
        return self._ends[0][0] if self._ends else NEVER

    def held_by(self, worker: SlotT) -> int:
        """Return the number of sequences whose state is in this worker."""
        return self._held[worker]

    def knows(self, id: str) -> bool:
        """Tell whether a sequence is running, or was lost without its client knowing."""
        return id in self._chains or id in self._lost

    def is_active(self, id: str) -> bool:
        return id in self._chains

    def share_losses(self, old: Sequences[SlotT]) -> None:
        """Share the record of lost sequences with those of a replaced version.

        A client that continues a sequence that was lost there then gets the error here.
        """
        self._lost.update(old._lost)
        old._lost = self._lost
        while len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)

    def admit(self, job: Job, mark: SequenceMark, now: float) -> str | None:
        """Accept a request, or return the reason against it.

        The first request of an id starts a sequence, even if it does not say so. But after a
        sequence of the id was lost, one request that continues it gets an error.
        """
        chain = self._chains.get(mark.id)
        if chain is None:
            lost = self._lost.pop(mark.id, None)
            if lost is not None and not mark.start:
                return f"Sequence {mark.id} {lost}"
            if len(self._chains) >= self.config.most:
                return (
                    f"{len(self._chains)} sequences are active, which is the limit (maxNumSequence)"
                )
            chain = self._chains[mark.id] = Chain(mark.id, now)
        elif chain.ending:
            return f"Sequence {mark.id} is closed: an earlier request ended it"
        elif self.config.timeout is not None and now >= chain.began + self.config.timeout:
            return (
                f"Sequence {mark.id} is over: it was started more than {self.config.timeout:g} s"
                " ago (sequenceTimeoutMSec)"
            )
        elif len(chain.waiting) >= self.config.queue:
            return (
                f"{len(chain.waiting)} requests of sequence {mark.id} wait, which is the limit"
                " (maxSequenceJobQueueSize)"
            )
        chain.last_activity = now
        chain.ending = mark.end
        chain.waiting.append(job)
        self._queued[chain] = None
        self._watch(chain)
        self._chain_of[job] = chain
        self.size += len(job.body)
        if job.deadline is not None:
            self.earliest = min(self.earliest, job.deadline)
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

        An idle worker has room for `limits.max_items` requests. If requests may be `joining`, a
        worker has room while it runs fewer sequences than that; a sequence that streams already has
        its place.

        The most urgent request goes first. A sequence goes to the worker that has its state. A new
        one goes to the worker with the fewest sequences that has room and is not `leaving`.
        """
        if joining:
            room = {worker: limits.max_items - worker.batches for worker in workers}
            for chain in self._streaming:
                if chain.worker in room:
                    room[chain.worker] += len(chain.streams) - (chain.running is None)
        else:
            room = {worker: 0 if worker.batches else limits.max_items for worker in workers}
        if all(places <= 0 for places in room.values()) and not self._streaming:
            return []
        space = dict.fromkeys(workers, limits.max_bytes)
        held = {worker: self.held_by(worker) for worker in workers if worker not in leaving}
        batches: dict[SlotT, list[Job]] = {}
        ready = [
            chain
            for chain in self._queued
            if chain.ready and len(chain.streams) <= self.config.queue
        ]
        for chain in sorted(ready, key=_head):
            job, worker = chain.waiting[0], chain.worker
            if worker is None:
                free = [worker for worker in held if room[worker] > 0]
                if not free:
                    continue
                worker = min(free, key=lambda worker: held[worker])
            if worker not in room or (room[worker] <= 0 and not chain.streams):
                continue
            if worker in batches and not joining and len(job.body) > space[worker]:
                continue
            if chain.worker is None:
                chain.worker = worker
                held[worker] += 1
                self._held[worker] += 1
            chain.waiting.popleft()
            if not chain.waiting:
                del self._queued[chain]
            chain.running = job
            self.size -= len(job.body)
            room[worker] -= not chain.streams
            space[worker] -= len(job.body)
            batches.setdefault(worker, []).append(job)
        return list(batches.items())

    def begun(self, job: Job) -> bool:
        """Note that an answer begins to stream; tell whether its sequence's next request may go."""
        chain = self._chain_of.get(job)
        if not self.config.overlap or chain is None or chain.running is not job:
            return False
        chain.running = None
        chain.streams.add(job)
        self._streaming[chain] = None
        return bool(chain.waiting)

    def answered(self, job: Job, now: float, *, last: bool = False) -> list[Refusal]:
        """Note that a request is answered or refused; the `last` one ends its sequence."""
        chain = self._chain_of.pop(job, None)
        if chain is None:  # Its sequence was over before.
            return []
        if chain.running is job:
            chain.running = None
        chain.streams.discard(job)
        if not chain.streams:
            self._streaming.pop(chain, None)
        chain.last_activity = now
        if last or (chain.ending and not chain.waiting and not chain.busy):
            return self._end(chain, CLOSED)
        self._watch(chain)
        return []

    def lost(self, worker: SlotT, reason: str) -> list[Refusal]:
        """End the sequences whose state was in this worker.

        Returns:
            The waiting requests to refuse, without running ones.
        """
        gone = [chain for chain in self._chains.values() if chain.worker is worker]
        return [refusal for chain in gone for refusal in self._end(chain, reason)]

    def expire(self, now: float) -> list[Refusal]:
        """End sequences whose time is over, but none with a running request.

        Of many sequences, some are left for the next call, so that other work can be done;
        `next_end` is then in the past.
        """
        refused: list[Refusal] = []
        for _ in range(MAX_EXPIRED):
            if self.next_end > now:
                break
            at, _, chain = heappop(self._ends)
            if at != chain.next_check or self._chains.get(chain.id) is not chain:
                continue
            chain.next_check = NEVER
            if chain.busy:  # The end of its answer checks it.
                continue
            if now >= self._end_of(chain):
                refused += self._end(chain, self._expiry_reason(chain, now))
            else:
                self._watch(chain)
        return refused

    def drop_over(self, now: float) -> list[Job]:
        """Remove jobs whose client has left or whose deadline has passed.

        There are some only if `some_left` or `earliest` say so. If the first request of a sequence
        is removed, those that follow it are removed too.
        """
        dropped: list[Job] = []
        for chain in list(self._queued):
            over = [
                job
                for job in chain.waiting
                if job.gone or (job.deadline is not None and job.deadline <= now)
            ]
            if over and chain.worker is None and over[0] is chain.waiting[0]:
                dropped += [job for job, _ in self._end(chain, CLOSED)]
                continue
            for job in over:
                del self._chain_of[job]
                chain.waiting.remove(job)
                self.size -= len(job.body)
            dropped += over
            if not chain.waiting:
                del self._queued[chain]
            if chain.ending and not chain.waiting and not chain.busy:
                self._end(chain, CLOSED)
            elif over:
                self._watch(chain)
        self.some_left = False
        self.earliest = min(
            (job.deadline for job in self._waiting() if job.deadline is not None), default=NEVER
        )
        return dropped

    def drop_all(self, reason: str) -> list[Refusal]:
        """End all sequences; running requests are still answered."""
        return [
            refusal for chain in list(self._chains.values()) for refusal in self._end(chain, reason)
        ]

    def _watch(self, chain: Chain[SlotT]) -> None:
        """Schedule a check for the time at which a sequence may be over.

        The check finds an end that has moved, and is then scheduled again.
        """
        end = self._end_of(chain)
        if end < chain.next_check:
            chain.next_check = end
            heappush(self._ends, (end, next(self._entries), chain))
            # Most entries belong to sequences that have ended.
            if len(self._ends) > 2 * len(self._chains) + MAX_STALE_ENTRIES:
                live = [chain for chain in self._chains.values() if chain.next_check < NEVER]
                self._ends = [(chain.next_check, next(self._entries), chain) for chain in live]
                heapify(self._ends)

    def _end_of(self, chain: Chain[SlotT]) -> float:
        """Return the end of a sequence without further events; waiting for a worker is not idle."""
        idle = NEVER if chain.waiting else chain.last_activity + self.config.max_idle
        return idle if self.config.timeout is None else min(idle, chain.began + self.config.timeout)

    def _expiry_reason(self, chain: Chain[SlotT], now: float) -> str:
        config = self.config
        if config.timeout is not None and now >= chain.began + config.timeout:
            return (
                f"is over: it was started more than {config.timeout:g} s ago (sequenceTimeoutMSec)"
            )
        return f"has expired: no request of it came for {config.max_idle:g} s (sequenceMaxIdleMSec)"

    def _end(self, chain: Chain[SlotT], reason: str) -> list[Refusal]:
        del self._chains[chain.id]
        self._queued.pop(chain, None)
        if chain.worker is not None:
            self._held[chain.worker] -= 1
            if not self._held[chain.worker]:
                del self._held[chain.worker]
        jobs = list(chain.waiting)
        self._streaming.pop(chain, None)
        for job in [
            *jobs,
            *chain.streams,
            *([chain.running] if chain.running is not None else []),
        ]:
            del self._chain_of[job]
        self.size -= sum(len(job.body) for job in jobs)
        if reason != CLOSED and len(chain.id) <= MAX_ID_CHARS:
            self._lost[chain.id] = reason
            if len(self._lost) > MAX_LOST:
                self._lost.popitem(last=False)
        return [(job, f"Sequence {chain.id} {reason}") for job in jobs]

    def _waiting(self) -> Iterator[Job]:
        return (job for chain in self._queued for job in chain.waiting)


def _head(chain: Chain[SlotT]) -> tuple[int, float, float]:
    job = chain.waiting[0]
    return (*urgency(job), job.arrived)
