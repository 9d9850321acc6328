"""The newest and the slowest requests of a version, with their times.

`tsx explain`, `tsx slowest` and /debug show them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tsx_runtime.core.telemetry.batch_times import (
    Batch,
    BatchTimes,
    arrival_times,
    oldest,
    times_of,
)

MAX_NEWEST = 2000  # requests
# Seconds per remembered request. At more than 250 requests a second, only 250 of them are
# remembered, so that MAX_NEWEST requests cover eight seconds.
PAUSE_PER_REQUEST_S = 4e-3
# Seconds, 500 times PAUSE_PER_REQUEST_S. After two seconds without a request, the next 500 are all
# remembered, however fast they come.
MAX_SAVED_PAUSE_S = 2.0
# The number of kept requests that asked for their times or are traced. They are remembered at any
# rate of requests; the oldest are dropped.
MAX_ALWAYS_REMEMBERED = 200
MAX_SLOWEST = 100
# Seconds. The slowest requests are taken from this period and the one before, so that a slow start
# is forgotten.
PERIOD_S = 1800.0


class RequestRecord(NamedTuple):
    """A request that a worker has answered, or that was refused."""

    request_id: bytes
    arrived: float  # time.monotonic()
    status: int
    took: float  # its duration in seconds
    times: BatchTimes | None  # its batch; None if no worker answered
    error: str = ""  # class of the error, if it was refused


def _records(batch: Batch, ids: bytes) -> list[RequestRecord]:
    _, _, answered, size, _, _, statuses = batch
    times = times_of(batch)
    requests = zip(ids.split(b"\n"), arrival_times(batch), statuses or (200,) * size, strict=True)
    return [
        RequestRecord(request_id, arrived, status, answered - arrived, times)
        for request_id, arrived, status in requests
    ]


class RecentRequests:
    """The newest and the slowest requests of a version, as far as they are remembered.

    A batch is one entry, whatever its size. `add` is needed only for a batch that is answered at
    `due` or later, or that has a request slower than `threshold`.
    """

    __slots__ = (
        "_newest",
        "_newest_count",
        "_number",
        "_period_end",
        "_previous",
        "_slowest",
        "always_remembered",
        "due",
        "threshold",
    )

    def __init__(self) -> None:
        self.always_remembered: deque[RequestRecord] = deque(maxlen=MAX_ALWAYS_REMEMBERED)
        self._newest: deque[tuple[Batch, bytes] | RequestRecord] = deque()
        self._newest_count = 0  # number of requests in `_newest`
        self.due = 0.0  # time.monotonic() from which the next batch is remembered
        self._number = itertools.count()  # It makes heap entries of equal duration comparable.
        # A heap of the duration, number and record of requests.
        self._slowest: list[tuple[float, int, RequestRecord]] = []
        self._previous: list[tuple[float, int, RequestRecord]] = []  # the previous period's heap
        self._period_end = 0.0  # time.monotonic() at the end of the period
        self.threshold = -1.0  # seconds; a slower request is among the slowest

    def add(self, batch: Batch, ids: bytes) -> None:
        """Remember a batch; `ids` are the ids of its requests, separated by newlines.

        The ids are one string, because freeing hundreds of small ones that have left the CPU's
        cache would be slow.
        """
        answered, size = batch[2], batch[3]
        if answered >= self.due:
            since = answered - MAX_SAVED_PAUSE_S
            self.due = (since if since > self.due else self.due) + PAUSE_PER_REQUEST_S * size
            self._newest.append((batch, ids))
            self._newest_count += size
            if self._newest_count > MAX_NEWEST:
                self._forget()
        if answered >= self._period_end:
            self._begin_period(answered)
        if answered - oldest(batch) > self.threshold:
            self._rank(_records(batch, ids))

    def add_refusal(self, record: RequestRecord) -> None:
        self._newest.append(record)
        self._newest_count += 1
        if self._newest_count > MAX_NEWEST:
            self._forget()
        if (now := record.arrived + record.took) >= self._period_end:
            self._begin_period(now)
        if record.took > self.threshold:
            self._rank((record,))

    def find(self, request_id: bytes) -> RequestRecord | None:
        return next(
            (record for record in self._candidates(request_id) if record.request_id == request_id),
            None,
        )

    def _candidates(self, request_id: bytes) -> Iterator[RequestRecord]:
        """Yield all records that may have this id."""
        yield from self.always_remembered
        for entry in reversed(self._newest):
            if isinstance(entry, RequestRecord):
                yield entry
            elif request_id in entry[1]:
                yield from _records(*entry)
        yield from (record for _, _, record in itertools.chain(self._slowest, self._previous))

    def newest(self) -> Iterator[RequestRecord]:
        """Yield the newest requests, newest first."""
        for entry in reversed(self._newest):
            yield from (entry,) if isinstance(entry, RequestRecord) else _records(*entry)

    def slowest(self) -> list[RequestRecord]:
        """Return the slowest requests, slowest first."""
        records = [record for _, _, record in itertools.chain(self._slowest, self._previous)]
        return heapq.nlargest(MAX_SLOWEST, records, key=lambda record: record.took)

    def _begin_period(self, now: float) -> None:
        self._previous, self._slowest = self._slowest, []
        self._period_end, self.threshold = now + PERIOD_S, -1.0

    def _rank(self, records: Iterable[RequestRecord]) -> None:
        heap = self._slowest
        for record in records:
            if record.took > self.threshold:
                heapq.heappush(heap, (record.took, next(self._number), record))
                if len(heap) > MAX_SLOWEST:
                    heapq.heappop(heap)
                    self.threshold = heap[0][0]

    def _forget(self) -> None:
        """Forget the oldest batches, but never the newest one, even if it is too large."""
        newest = self._newest
        while self._newest_count > MAX_NEWEST and len(newest) > 1:
            entry = newest.popleft()
            self._newest_count -= 1 if isinstance(entry, RequestRecord) else entry[0][3]
