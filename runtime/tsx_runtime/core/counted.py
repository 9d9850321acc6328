"""What became of a version's batches, counted many at a time: together they cost a fraction of what each costs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tsx_runtime.core.durations import FINE, Durations
from tsx_runtime.core.recent import Batch, Recent
from tsx_runtime.core.times import batch_times


class Counted:
    """Plain numbers. Whoever reads them through `Stats` finds all that was answered in them."""

    __slots__ = (
        "answers",
        "batch_sizes",
        "batch_wait",
        "batches",
        "busy_seconds",
        "inference",
        "last_queue_seconds",
        "last_worker_seconds",
        "latency",
        "postprocess",
        "preprocess",
        "queue",
        "queue_seconds",
        "recent",
    )

    def __init__(self) -> None:
        self.batches = 0  # answered by a worker
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
        self.last_queue_seconds = 0.0  # of the newest batch: its oldest request's wait
        self.last_worker_seconds = 0.0  # of the newest batch
        self.recent = Recent()

    def add(self, batches: Sequence[Batch]) -> None:
        """In the order in which they were answered."""
        took: list[float] = []
        queued: list[float] = []
        waited: list[float] = []
        for batch in batches:
            points, ids, arrived, statuses = batch
            times = batch_times(points, len(ids))
            free, sent, began, _, answered, size, _, _, _ = times
            if statuses is None:
                self.answers[200] += size
            else:
                self.answers.update(statuses)
            self.batch_sizes[size] += 1
            self.queue_seconds += size * sent - sum(arrived)
            self.busy_seconds += answered - sent
            took += [answered - at for at in arrived]
            if max(arrived) <= free:  # as nearly always under load
                queued += [free - at for at in arrived]
                waited += [began - free] * size
            else:
                queued += [free - at if at < free else 0.0 for at in arrived]
                waited += [began - (free if at < free else at) for at in arrived]
            self._add_steps(*times[-3:])
            self.recent.add(batch)
        self.batches += len(batches)
        self.latency.add_all(took)
        self.queue.add_all(queued)
        self.batch_wait.add_all(waited)
        (_, sent, answered, _), _, arrived, _ = batches[-1]
        self.last_queue_seconds, self.last_worker_seconds = sent - arrived[0], answered - sent

    def _add_steps(self, preprocess: float, inference: float, postprocess: float) -> None:
        if preprocess >= 0.0:  # NaN is not
            self.preprocess.add(preprocess)
        if inference >= 0.0:
            self.inference.add(inference)
        if postprocess >= 0.0:
            self.postprocess.add(postprocess)
