"""What batches add to a version's numbers: gathered as it comes, and counted many batches at a time, which costs a third."""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from tsx_runtime.core.durations import FINE, Durations

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BATCHES, REQUESTS = 512, 4096  # of whichever there are so many is counted: within two tenths of a millisecond, which no client feels
# entries of a batch: free, sent, answered (see times.py), requests, what the worker told, the statuses if not all are 200, and when each
# request arrived: in bytes, since thousands of floats that are kept for a while would each lie elsewhere
ROW = 7


class Counted:
    """Sums over the batches of a version that its workers have answered."""

    __slots__ = (
        "answers",
        "batch_sizes",
        "batch_wait",
        "batches",
        "busy_seconds",
        "inference",
        "latency",
        "postprocess",
        "preprocess",
        "queue",
        "queue_seconds",
    )

    def __init__(self) -> None:
        self.batches = 0
        self.answers: Counter[int] = Counter()  # by HTTP status
        self.batch_sizes: Counter[int] = Counter()  # batches by the number of their items
        self.latency = Durations(FINE)  # of requests: arrival to reply
        self.queue = Durations()  # of requests: see times.py
        self.batch_wait = Durations()  # of requests, too
        self.preprocess = Durations()  # of batches, as are those that follow: in the worker
        self.inference = Durations()
        self.postprocess = Durations()
        self.queue_seconds = 0.0  # sum over requests: arrival to the frame's leaving, which is TorchServe's queue time
        self.busy_seconds = 0.0  # sum over batches: the frame's leaving to its reply


class Gathered:
    """Grows on the hot path, once a batch, and is settled now and then; who reads asks for `counted()`, from any thread.

    `rows` is flat and always the same list, since another thread may be about to add to it; a batch is added at once.
    """

    __slots__ = ("_counted", "_lock", "requests", "rows")

    def __init__(self) -> None:
        self.rows: list[Any] = []  # `ROW` entries for each batch
        self.requests = 0  # in them, or a few more
        self._counted = Counted()
        self._lock = threading.Lock()

    def counted(self) -> Counted:
        if self.rows:
            self.settle()
        return self._counted

    def settle(self) -> None:
        with self._lock:
            rows = self.rows[:]
            del self.rows[: len(rows)]
            self.requests = 0
            if rows:
                self._count(rows)

    def _count(self, rows: Sequence[Any]) -> None:
        """As `batch_times` and `BatchTimes` have it for one."""
        import numpy as np

        counted, size, numbers = self._counted, len(rows) // ROW, rows[3::ROW]
        free, sent, answered = packed(*rows[::ROW], *rows[1::ROW], *rows[2::ROW]).reshape(3, size)
        began, seconds, *steps = np.frombuffer(b"".join(rows[4::ROW]), "<f8").reshape(size, -1).T
        arrived = np.frombuffer(b"".join(rows[6::ROW]), "d")
        most = answered - sent
        free = np.minimum(free, sent)
        seconds = np.where((seconds >= 0) & (seconds <= most), seconds, most)
        latest = answered - seconds
        began = np.where((began >= sent) & (began <= latest), began, latest)
        counted.batches += size
        counted.busy_seconds += float(most.sum())
        for durations, step in zip((counted.preprocess, counted.inference, counted.postprocess), steps, strict=True):
            known = step >= 0  # NaN is not
            if known.any():
                durations.add(np.minimum(step, seconds)[known])
        if len(arrived) == size:
            counted.batch_sizes[1] += size
        else:  # from here on: by request
            counted.batch_sizes.update(numbers)
            times = np.array(numbers)
            free, sent, began, answered = (np.repeat(each, times) for each in (free, sent, began, answered))
        counted.queue_seconds += float((sent - arrived).sum())
        ready = np.maximum(free, arrived)
        counted.latency.add(answered - arrived)
        counted.queue.add(ready - arrived)
        counted.batch_wait.add(began - ready)
        statuses = Counter(chain.from_iterable(filter(None, rows[5::ROW])))
        if others := len(arrived) - statuses.total():
            statuses[200] += others
        counted.answers.update(statuses)


def packed(*values: float) -> NDArray[np.float64]:
    """As an array, in a fifth of the time that `np.array` takes for a list."""
    import numpy as np  # here: importing this module costs nothing

    return np.frombuffer(struct.pack(f"{len(values)}d", *values))
