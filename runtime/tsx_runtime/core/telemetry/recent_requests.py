"""The newest and the slowest requests of a version, with their times: for `tsx explain`, `tsx
slowest` and /debug.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tsx_runtime.core.telemetry.batch_times import Batch, BatchTimes, moments, oldest, times_of

NEWEST = 2000  # requests
# seconds for each request that is kept: of more than 250 a second the newest are a part, which
# reaches eight seconds back
PAUSE = 4e-3
SAVED = 2.0  # seconds of a pause that are made up for: 500 requests at once are all kept
# requests that asked where their time went, or whose trace is kept; these are remembered in any
# case
ASKED = 200
SLOWEST = 100
# seconds; the slowest are those of this period and of the one before it, so that a slow start is
# forgotten
PERIOD = 1800.0


class RequestRecord(NamedTuple):
    """One request that was answered, by a worker or by a refusal."""

    request_id: bytes
    arrived: float  # time.monotonic()
    status: int
    took: float  # seconds
    times: BatchTimes | None  # of the batch that it was in; None where no worker answered it
    error: str = ""  # the class of the refusal


def _seen(batch: Batch, ids: bytes) -> list[RequestRecord]:
    _, _, answered, size, _, _, statuses = batch
    times = times_of(batch)
    requests = zip(ids.split(b"\n"), moments(batch), statuses or (200,) * size, strict=True)
    return [
        RequestRecord(request_id, arrived, status, answered - arrived, times)
        for request_id, arrived, status in requests
    ]


class RecentRequests:
    """A batch costs one entry however many requests it has; the slowest are looked for only among
    those that might be.

    `add` is to be called for a batch that was answered at `due` or later, or a request of which
    took longer than `threshold`.
    """

    __slots__ = (
        "_before",
        "_kept",
        "_newest",
        "_number",
        "_slowest",
        "_turn",
        "asked",
        "due",
        "threshold",
    )

    def __init__(self) -> None:
        self.asked: deque[RequestRecord] = deque(maxlen=ASKED)
        self._newest: deque[tuple[Batch, bytes] | RequestRecord] = deque()
        self._kept = 0  # requests in it
        self.due = 0.0  # time.monotonic() from which on the next batch is kept
        self._number = itertools.count()  # tells those apart that took as long
        self._slowest: list[tuple[float, int, RequestRecord]] = []  # a heap
        self._before: list[tuple[float, int, RequestRecord]] = []  # that of the period before
        self._turn = 0.0  # time.monotonic() when the period ends
        self.threshold = -1.0  # seconds that a request must have taken to be among the slowest

    def add(self, batch: Batch, ids: bytes) -> None:
        """`ids`: those of its requests, with newlines between: hundreds of pieces would be out of
        the cache when they are freed.
        """
        answered, size = batch[2], batch[3]
        if answered >= self.due:
            since = answered - SAVED
            self.due = (since if since > self.due else self.due) + PAUSE * size
            self._newest.append((batch, ids))
            self._kept += size
            if self._kept > NEWEST:
                self._forget()
        if answered >= self._turn:
            self._begin_period(answered)
        if answered - oldest(batch) > self.threshold:
            self._rank(_seen(batch, ids))

    def refused(self, seen: RequestRecord) -> None:
        self._newest.append(seen)
        self._kept += 1
        if self._kept > NEWEST:
            self._forget()
        if (now := seen.arrived + seen.took) >= self._turn:
            self._begin_period(now)
        if seen.took > self.threshold:
            self._rank((seen,))

    def find(self, request_id: bytes) -> RequestRecord | None:
        return next((seen for seen in self._all(request_id) if seen.request_id == request_id), None)

    def _all(self, wanted: bytes) -> Iterator[RequestRecord]:
        """Whose id that may be."""
        yield from self.asked
        for entry in reversed(self._newest):
            if isinstance(entry, RequestRecord):
                yield entry
            elif wanted in entry[1]:
                yield from _seen(*entry)
        yield from (seen for _, _, seen in itertools.chain(self._slowest, self._before))

    def newest(self) -> Iterator[RequestRecord]:
        """The newest first."""
        for entry in reversed(self._newest):
            yield from (entry,) if isinstance(entry, RequestRecord) else _seen(*entry)

    def slowest(self) -> list[RequestRecord]:
        """The slowest first."""
        seen = [seen for _, _, seen in itertools.chain(self._slowest, self._before)]
        return heapq.nlargest(SLOWEST, seen, key=lambda each: each.took)

    def _begin_period(self, now: float) -> None:
        self._before, self._slowest = self._slowest, []
        self._turn, self.threshold = now + PERIOD, -1.0

    def _rank(self, seen: Iterable[RequestRecord]) -> None:
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
            self._kept -= 1 if isinstance(entry, RequestRecord) else entry[0][3]
