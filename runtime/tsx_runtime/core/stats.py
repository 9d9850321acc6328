"""What happened to a version's requests, as plain integers and floats that `/metrics` renders when it is read."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar, cast

from tsx_runtime.core.counted import Counted
from tsx_runtime.core.durations import Durations, Exemplar
from tsx_runtime.core.jobs import Job
from tsx_runtime.core.journal import Journal
from tsx_runtime.core.recent import Batch, Recent, Seen
from tsx_runtime.core.times import BatchTimes, Points, batch_times
from tsx_runtime.core.told import Told
from tsx_runtime.errors import ClientLeft, TsxError
from tsx_runtime.wire import Item, MetricDelta

MOST_LABEL_SETS = 1000  # of one metric that a handler reports
MOST_METRICS = 1000  # that the handler of one version reports
MOST_ASIDE = 2000  # requests of batches that are not counted yet: that takes less than a millisecond
OTHERS = ""  # stands for the names of those beyond
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

VALUE_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)  # of handlers' histograms, as TorchServe's

T = TypeVar("T")
MetricKey = tuple[str, str, str, tuple[tuple[str, str], ...]]  # name, type, unit, dimensions


logger = logging.getLogger("tsx.metrics")


class HandlerMetric:
    """A metric that a handler reported. A gauge keeps the last value, a counter the sum, a histogram sum, count and buckets."""

    __slots__ = ("buckets", "count", "last", "sum")

    def __init__(self, kind: str = "gauge") -> None:
        self.buckets = [0] * (len(VALUE_BOUNDS) + 1) if kind == "histogram" else []  # each for itself
        self.last = 0.0
        self.sum = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.last = value
        self.sum += value
        self.count += 1
        if self.buckets:
            self.buckets[bisect_left(VALUE_BOUNDS, value)] += 1


class _Settled(Generic[T]):
    """A number of `counted`, which is brought up to date when somebody reads it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stats: Stats, owner: type | None = None) -> T:
        stats.settle()
        return cast("T", getattr(stats.counted, self._name))


class Stats:
    """One version's numbers. The hot path puts each batch aside; what it comes to is counted for many at a time."""

    __slots__ = (
        "_aside",
        "_aside_requests",
        "_label_sets",
        "_newest",
        "counted",
        "dropped_metrics",
        "failures",
        "handler_metrics",
        "journal",
        "label",
        "recycled",
        "refusals",
        "requests",
        "restarts",
        "stuck",
        "told",
    )

    batches = _Settled[int]()  # these are told in counted.py
    answers = _Settled[Counter[int]]()
    batch_sizes = _Settled[Counter[int]]()
    latency = _Settled[Durations]()
    queue = _Settled[Durations]()
    batch_wait = _Settled[Durations]()
    preprocess = _Settled[Durations]()
    inference = _Settled[Durations]()
    postprocess = _Settled[Durations]()
    queue_seconds = _Settled[float]()
    busy_seconds = _Settled[float]()
    last_queue_seconds = _Settled[float]()
    last_worker_seconds = _Settled[float]()
    recent = _Settled[Recent]()

    def __init__(self, label: str = "") -> None:
        self.label = label  # as the log names it
        self.requests = 0  # accepted
        self.refusals: Counter[str] = Counter()  # by the name of the error class
        self.failures = 0  # refusals that are not the client's fault
        self.restarts = 0
        self.recycled: Counter[str] = Counter()  # workers that were replaced for their requests, memory, age or cores
        self.stuck: Counter[str] = Counter()  # workers that were killed because they were stopped or silent
        self.handler_metrics: dict[MetricKey, HandlerMetric] = {}
        self.dropped_metrics: Counter[str] = Counter()  # values that handlers reported and nobody sees, by the name of the metric
        self._label_sets: Counter[str] = Counter()  # in `handler_metrics`, by the name of the metric
        self.journal: Journal | None = None  # where a metric log is written
        self.told = Told()  # what handlers raised and printed, and how workers ended
        self.counted = Counted()  # without what is aside
        self._aside: list[Batch] = []
        self._aside_requests = 0
        self._newest: tuple[Points, int] | None = None

    @property
    def errors(self) -> int:
        """Requests that failed through no fault of their client's: answers of 500 and above, and refusals."""
        return self.failures + sum(count for status, count in self.answers.items() if status >= 500)

    def add_batch(self, jobs: Sequence[Job], items: Sequence[Item], points: Points) -> None:
        """Once a batch, on the hot path, before its answers are written."""
        arrived, ids, statuses = [job.arrived for job in jobs], [job.request_id for job in jobs], [item[0] for item in items]
        self._newest = points, len(ids)
        self._aside.append((points, ids, arrived, None if statuses.count(200) == len(ids) else statuses))
        self._aside_requests += len(ids)
        if self._aside_requests >= MOST_ASIDE:
            self.settle()
        if self.journal is not None:
            self.journal.add_batch(points[1] - arrived[0], points[2] - points[1])

    def settle(self) -> None:
        if self._aside:
            batches, self._aside, self._aside_requests = self._aside, [], 0
            self.counted.add(batches)

    @property
    def batch(self) -> BatchTimes | None:
        """The newest, also while its requests are answered."""
        return None if self._newest is None else batch_times(*self._newest)

    def keep(self, request_id: bytes, arrived: float, status: int) -> None:
        """Remember this request of the newest batch, however many others there are."""
        times = self.batch
        if times is not None:
            self.counted.recent.asked.append(Seen(request_id, arrived, status, times.total(arrived), times))

    def point_out(self, trace_id: str, arrived: float) -> None:
        """A request of the newest batch belongs to a trace that somebody keeps."""
        times, now = self.batch, time.time()
        if times is None:
            return
        for durations, seconds in (
            (self.latency, times.total(arrived)),
            (self.queue, times.queue(arrived)),
            (self.batch_wait, times.wait(arrived)),
            (self.preprocess, times.preprocess),
            (self.inference, times.inference),
            (self.postprocess, times.postprocess),
        ):
            if seconds >= 0.0:  # NaN is not
                durations.point_out(Exemplar(trace_id, seconds, now))

    def add_refusal(self, job: Job, error: TsxError, now: float) -> None:
        name = type(error).__name__
        self.refusals[name] += 1
        if type(error).status >= 500 and not isinstance(error, ClientLeft):  # of the class: a full queue may be answered with 429
            self.failures += 1
        self.recent.refused(Seen(job.request_id, job.arrived, error.status, now - job.arrived, None, name))

    def add_handler_metrics(self, deltas: Iterable[MetricDelta]) -> None:
        for delta in deltas:
            key = (delta["name"], delta["type"], delta["unit"], tuple(sorted(delta["dimensions"].items())))
            metric = self.handler_metrics.get(key) or self._begin_metric(key)
            if metric is not None:
                metric.add(delta["value"])

    def _begin_metric(self, key: MetricKey) -> HandlerMetric | None:
        """None where a handler reports without bound, as one does whose labels hold ids: each would be kept for good."""
        name = key[0]
        if self._label_sets[name] < MOST_LABEL_SETS and (name in self._label_sets or len(self._label_sets) < MOST_METRICS):
            self._label_sets[name] += 1
            metric = self.handler_metrics[key] = HandlerMetric(key[1])
            return metric
        shown = name if name in self._label_sets else OTHERS
        if not self.dropped_metrics[shown]:
            many = f"the metric {name} with more than {MOST_LABEL_SETS} sets of labels" if shown else f"more than {MOST_METRICS} metrics"
            text = "%s: its handler reports %s; further ones are dropped, and tsx_handler_metric_drops_total counts them"
            logger.warning(text, self.label or "a model", many)
        self.dropped_metrics[shown] += 1
        return None
