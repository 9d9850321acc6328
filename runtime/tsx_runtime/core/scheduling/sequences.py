"""The sequences of a stateful model: their requests, their worker, and their end.

Everything here is decided without I/O and without a clock. Contract section 6.3.
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

REMEMBERED = 4096  # sequences that were lost, and why, for clients that go on with them
LONGEST_REMEMBERED = (
    512  # characters of an id: clients choose them, and together they must not fill the memory
)
LEFT_OVER = 64  # entries of sequences that have ended, which the heap may hold before it is rebuilt
AT_ONCE = 1000
CLOSED = "is closed"


class SequenceConfig(NamedTuple):
    """The sequence settings of a model."""

    max_idle: float  # seconds without a request after which one is over
    timeout: float | None = None  # seconds after its start; None: any time
    most: int = 1  # at a time
    queue: int = 1  # requests of one that may wait
    # whether a request is sent while those before it stream: it may tell the handler to end these
    overlap: bool = False


Refusal: TypeAlias = tuple[Job, str]  # a request that waited, and why it will not be answered


class SequenceMark(NamedTuple):
    """The sequence headers of a request."""

    id: str
    start: bool
    end: bool


class Chain(Generic[SlotT]):
    """One sequence: its requests are answered by the same worker, one after the other; where they
    overlap, beside those that stream.
    """

    __slots__ = (
        "began",
        "ending",
        "id",
        "looked_at",
        "streams",
        "touched",
        "under_way",
        "waiting",
        "worker",
    )

    def __init__(self, id: str, now: float) -> None:
        self.id = id
        self.worker: SlotT | None = None  # from its first request that leaves the queue
        self.waiting: deque[Job] = deque()
        self.under_way: Job | None = None
        self.streams: set[Job] = (
            set()
        )  # whose answers have begun, where others may be sent meanwhile
        self.began = now
        self.touched = now  # when its last request came, or was answered
        self.ending = False  # a request has said that it is the last
        self.looked_at = NEVER  # when it is next asked whether its time is over

    @property
    def ready(self) -> bool:
        return self.under_way is None and bool(self.waiting)

    @property
    def busy(self) -> bool:
        return self.under_way is not None or bool(self.streams)


class Sequences(Generic[SlotT]):
    """The active sequences of one version.

    A sequence is over once its last request is answered, once it was idle for `max_idle`, `timeout`
    after its start, or with the worker that has its state. What it still has waiting then is given
    back as refusals.

    What a request costs here grows with those that wait, never with the sequences that only live.
    """

    def __init__(self, config: SequenceConfig) -> None:
        self.config = config
        self.size = 0  # bytes of the bodies that wait
        self.some_left = False  # a client may have left since `drop_over` was last called
        self.earliest = NEVER  # no deadline of what waits is before this
        self._chains: dict[str, Chain[SlotT]] = {}
        self._of: dict[Job, Chain[SlotT]] = {}  # of all jobs that are here
        self._queued: dict[Chain[SlotT], None] = {}  # those with requests that wait
        self._streaming: dict[
            Chain[SlotT], None
        ] = {}  # those with requests that stream while others may be sent
        self._held: Counter[SlotT] = Counter()  # sequences that have their state in a worker
        self._ends: list[
            tuple[float, int, Chain[SlotT]]
        ] = []  # a heap: when to ask of which whether its time is over
        self._entries = itertools.count()  # numbers of what comes into the heap
        self._lost: OrderedDict[str, str] = (
            OrderedDict()
        )  # sequences that ended before their end: id -> why

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(len(chain.waiting) for chain in self._queued)

    @property
    def active(self) -> int:
        return len(self._chains)

    @property
    def next_end(self) -> float:
        """No sequence is over by its time before this."""
        return self._ends[0][0] if self._ends else NEVER

    def held_by(self, worker: SlotT) -> int:
        """How many sequences have their state in this worker."""
        return self._held[worker]

    def knows(self, id: str) -> bool:
        """Whether a sequence of that id is under way, or was lost and its client does not know
        yet.
        """
        return id in self._chains or id in self._lost

    def is_active(self, id: str) -> bool:
        return id in self._chains

    def share_losses(self, old: Sequences[SlotT]) -> None:
        """From now on, a client that continues a sequence here that was lost there gets the error
        too.
        """
        self._lost.update(old._lost)
        old._lost = self._lost
        while len(self._lost) > REMEMBERED:
            self._lost.popitem(last=False)

    def admit(self, job: Job, mark: SequenceMark, now: float) -> str | None:
        """Take a request, or say why not.

        The first of an id starts a sequence, also where it does not say so. But where one of that
        id was lost, a request that continues it gets an error, once.
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
        chain.touched = now
        chain.ending = mark.end
        chain.waiting.append(job)
        self._queued[chain] = None
        self._watch(chain)
        self._of[job] = chain
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
        """Take out what is to be done now: of each sequence one request at a time.

        A worker has room while it is idle, for `limits.max_items` requests; where requests may be
        `joining`, while it has fewer than so many sequences under way. A sequence that streams has
        its place already. The most urgent goes first. A sequence goes to the worker that has its
        state. A new one goes to the worker with room that has the fewest, but to none of those that
        are `leaving`.
        """
        if joining:
            room = {worker: limits.max_items - worker.batches for worker in workers}
            for chain in self._streaming:
                if chain.worker in room:
                    room[chain.worker] += len(chain.streams) - (chain.under_way is None)
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
            chain.under_way = job
            self.size -= len(job.body)
            room[worker] -= not chain.streams
            space[worker] -= len(job.body)
            batches.setdefault(worker, []).append(job)
        return list(batches.items())

    def begun(self, job: Job) -> bool:
        """A request's answer has begun to stream.

        Whether the next one of its sequence may be sent now.
        """
        chain = self._of.get(job)
        if not self.config.overlap or chain is None or chain.under_way is not job:
            return False
        chain.under_way = None
        chain.streams.add(job)
        self._streaming[chain] = None
        return bool(chain.waiting)

    def answered(self, job: Job, now: float, *, last: bool = False) -> list[Refusal]:
        """A request's answer is complete, or will never be.

        Its sequence is over where it was the `last`.
        """
        chain = self._of.pop(job, None)
        if chain is None:  # its sequence was over before
            return []
        if chain.under_way is job:
            chain.under_way = None
        chain.streams.discard(job)
        if not chain.streams:
            self._streaming.pop(chain, None)
        chain.touched = now
        if last or (chain.ending and not chain.waiting and not chain.busy):
            return self._end(chain, CLOSED)
        self._watch(chain)
        return []

    def lost(self, worker: SlotT, why: str) -> list[Refusal]:
        """The worker is gone, and the state of its sequences with it.

        What is under way is not among what is to be refused.
        """
        gone = [chain for chain in self._chains.values() if chain.worker is worker]
        return [refusal for chain in gone for refusal in self._end(chain, why)]

    def expire(self, now: float) -> list[Refusal]:
        """End what is over by its time.

        One that has a request under way is not over before that is answered.

        Of many at once some are left for the next call, since nothing else is done meanwhile;
        `next_end` is past then.
        """
        refused: list[Refusal] = []
        for _ in range(AT_ONCE):
            if self.next_end > now:
                break
            at, _, chain = heappop(self._ends)
            if at != chain.looked_at or self._chains.get(chain.id) is not chain:
                continue
            chain.looked_at = NEVER
            if chain.busy:  # its answer sees to it
                continue
            if now >= self._end_of(chain):
                refused += self._end(chain, self._why_over(chain, now))
            else:
                self._watch(chain)
        return refused

    def drop_over(self, now: float) -> list[Job]:
        """Take out jobs whose client has left or whose deadline has passed: there are some only
        where `some_left` or `earliest` say so.

        The request that starts a sequence takes those that follow it along.
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
                del self._of[job]
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

    def drop_all(self, why: str) -> list[Refusal]:
        """End all sequences; what is under way is still answered."""
        return [
            refusal for chain in list(self._chains.values()) for refusal in self._end(chain, why)
        ]

    def _watch(self, chain: Chain[SlotT]) -> None:
        """Have it looked at when it may be over.

        An end that has moved since is found then, and scheduled again.
        """
        end = self._end_of(chain)
        if end < chain.looked_at:
            chain.looked_at = end
            heappush(self._ends, (end, next(self._entries), chain))
            if (
                len(self._ends) > 2 * len(self._chains) + LEFT_OVER
            ):  # most are of sequences that have ended
                live = [chain for chain in self._chains.values() if chain.looked_at < NEVER]
                self._ends = [(chain.looked_at, next(self._entries), chain) for chain in live]
                heapify(self._ends)

    def _end_of(self, chain: Chain[SlotT]) -> float:
        """When it is over if nothing happens. One that waits for a worker does not idle."""
        idle = NEVER if chain.waiting else chain.touched + self.config.max_idle
        return idle if self.config.timeout is None else min(idle, chain.began + self.config.timeout)

    def _why_over(self, chain: Chain[SlotT], now: float) -> str:
        config = self.config
        if config.timeout is not None and now >= chain.began + config.timeout:
            return (
                f"is over: it was started more than {config.timeout:g} s ago (sequenceTimeoutMSec)"
            )
        return f"has expired: no request of it came for {config.max_idle:g} s (sequenceMaxIdleMSec)"

    def _end(self, chain: Chain[SlotT], why: str) -> list[Refusal]:
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
            *([chain.under_way] if chain.under_way is not None else []),
        ]:
            del self._of[job]
        self.size -= sum(len(job.body) for job in jobs)
        if why != CLOSED and len(chain.id) <= LONGEST_REMEMBERED:
            self._lost[chain.id] = why
            if len(self._lost) > REMEMBERED:
                self._lost.popitem(last=False)
        return [(job, f"Sequence {chain.id} {why}") for job in jobs]

    def _waiting(self) -> Iterator[Job]:
        return (job for chain in self._queued for job in chain.waiting)


def _head(chain: Chain[SlotT]) -> tuple[int, float, float]:
    job = chain.waiting[0]
    return (*urgency(job), job.arrived)
