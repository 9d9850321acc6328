"""What became of the newest requests of a version, and of the slowest: for `tsx explain`, `tsx slowest` and /debug."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from tsx_runtime.core.times import Batch, BatchTimes, times_of

NEWEST = 2000  # requests
PAUSE = 500e-6  # seconds for each request that is kept: of more than 2,000 a second the newest are a part, from a longer time
ASKED = 200  # requests that asked where their time went, or whose trace is kept; these are remembered in any case
SLOWEST = 100
PERIOD = 1800.0  # seconds; the slowest are those of this period and of the one before it, so that a slow start is forgotten


class Seen(NamedTuple):
    """One request that was answered, by a worker or by a refusal."""

    request_id: bytes
    arrived: float  # time.monotonic()
    status: int
    took: float  # seconds
    times: BatchTimes | None  # of the batch that it was in; None where no worker answered it
    error: str = ""  # the class of the refusal


Kept: TypeAlias = tuple[Batch, list[bytes], list[float], Sequence[int] | None]  # ids, arrivals, statuses (None: all 200)


def _of_batch(kept: Kept, times: BatchTimes, position: int) -> Seen:
    _, ids, arrived, statuses = kept
    status = 200 if statuses is None else statuses[position]
    return Seen(ids[position], arrived[position], status, times.answered - arrived[position], times)


class Recent:
    """A batch costs one entry however many requests it has; the slowest are looked for only among those that might be.

    `add` is to be called for a batch that was answered at `due` or later, or a request of which took longer than `threshold`.
    """

    __slots__ = ("_before", "_kept", "_newest", "_number", "_slowest", "_turn", "asked", "due", "threshold")

    def __init__(self) -> None:
        self.asked: deque[Seen] = deque(maxlen=ASKED)
        self._newest: deque[Kept | Seen] = deque()
        self._kept = 0  # requests in it
        self.due = 0.0  # time.monotonic() from which on the next batch is kept
        self._number = itertools.count()  # tells those apart that took as long
        self._slowest: list[tuple[float, int, Seen]] = []  # a heap
        self._before: list[tuple[float, int, Seen]] = []  # that of the period before
        self._turn = 0.0  # time.monotonic() when the period ends
        self.threshold = -1.0  # seconds that a request must have taken to be among the slowest

    def add(self, batch: Batch, ids: list[bytes], arrived: list[float], statuses: Sequence[int] | None) -> None:
        """The lists are kept as they are; its times are reckoned when somebody looks."""
        kept, answered = (batch, ids, arrived, statuses), batch[2]
        if answered >= self.due:
            size, since = len(ids), answered - 0.1
            self.due = (since if since > self.due else self.due) + PAUSE * size
            self._newest.append(kept)
            self._kept += size
            if self._kept > NEWEST:
                self._forget()
        if answered >= self._turn:
            self._begin_period(answered)
        threshold = self.threshold
        if answered - min(arrived) > threshold:
            times = times_of(batch)
            self._rank(_of_batch(kept, times, position) for position, at in enumerate(arrived) if answered - at > threshold)

    def refused(self, seen: Seen) -> None:
        self._newest.append(seen)
        self._kept += 1
        if self._kept > NEWEST:
            self._forget()
        if (now := seen.arrived + seen.took) >= self._turn:
            self._begin_period(now)
        if seen.took > self.threshold:
            self._rank((seen,))

    def find(self, request_id: bytes) -> Seen | None:
        for entry in itertools.chain(self.asked, reversed(self._newest)):
            if isinstance(entry, Seen):
                if entry.request_id == request_id:
                    return entry
            elif request_id in entry[1]:
                return _of_batch(entry, times_of(entry[0]), entry[1].index(request_id))
        return next((seen for _, _, seen in itertools.chain(self._slowest, self._before) if seen.request_id == request_id), None)

    def newest(self) -> Iterator[Seen]:
        """The newest first."""
        for entry in reversed(self._newest):
            if isinstance(entry, Seen):
                yield entry
            else:
                times = times_of(entry[0])
                yield from (_of_batch(entry, times, position) for position in range(len(entry[1])))

    def slowest(self) -> list[Seen]:
        """The slowest first."""
        return slowest_of([seen for _, _, seen in itertools.chain(self._slowest, self._before)])

    def _begin_period(self, now: float) -> None:
        self._before, self._slowest = self._slowest, []
        self._turn, self.threshold = now + PERIOD, -1.0

    def _rank(self, seen: Iterable[Seen]) -> None:
        heap = self._slowest
        for each in seen:
            if each.took > self.threshold:
                heapq.heappush(heap, (each.took, next(self._number), each))
                if len(heap) > SLOWEST:
                    heapq.heappop(heap)
                    self.threshold = heap[0][0]

    def _forget(self) -> None:
        """The newest batch stays, however large it is."""
        newest = self._newest
        while self._kept > NEWEST and len(newest) > 1:
            entry = newest.popleft()
            self._kept -= 1 if isinstance(entry, Seen) else entry[0][3]


def slowest_of(seen: Sequence[Seen]) -> list[Seen]:
    return heapq.nlargest(SLOWEST, seen, key=lambda each: each.took)
