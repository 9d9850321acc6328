"""The statistics of a version's requests, as plain integers and floats that `/metrics` renders on
demand.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from tsx_runtime.core.telemetry.aggregation import OF_A_BATCH, BatchAggregator
from tsx_runtime.core.telemetry.batch_times import Batch, BatchTimes, oldest, times_of
from tsx_runtime.core.telemetry.error_log import ErrorLog
from tsx_runtime.core.telemetry.histogram import SHOWN, Durations, Exemplar
from tsx_runtime.core.telemetry.metric_journal import MetricJournal
from tsx_runtime.core.telemetry.recent_requests import RecentRequests, RequestRecord
from tsx_runtime.errors import TsxError, is_failure
from tsx_runtime.wire import MetricDelta

MOST_LABEL_SETS = 1000  # of one metric that a handler reports
MOST_METRICS = 1000  # that the handler of one version reports
OTHERS = ""  # stands for the names of those beyond
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

VALUE_BOUNDS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)  # of handlers' histograms, as TorchServe's
# the metrics of text generation: their histograms have the bounds of the server's own, as tokens
# take less
GENERATION = "tsx_generation_"

T = TypeVar("T")

MetricKey = tuple[str, str, str, tuple[tuple[str, str], ...]]  # name, type, unit, dimensions


logger = logging.getLogger("tsx.metrics")


class QueuedRequest(Protocol):
    """The part of a job that statistics need."""

    arrived: float  # time.monotonic()
    deadline: float | None
    priority: int

    @property
    def request_id(self) -> bytes: ...


class Serving(Protocol):
    @property
    def in_flight(self) -> int:
        """Requests that are accepted and have not ended."""
        ...


class HandlerMetric:
    """A metric that a handler reported.

    A gauge keeps the last value, a counter the sum, a histogram sum, count and buckets.
    """

    __slots__ = ("bounds", "buckets", "count", "last", "sum")

    def __init__(self, kind: str = "gauge", bounds: Sequence[float] = VALUE_BOUNDS) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1) if kind == "histogram" else []  # each for itself
        self.last = 0.0
        self.sum = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.last = value
        self.sum += value
        self.count += 1
        if self.buckets:
            self.buckets[bisect_left(self.bounds, value)] += 1


class _Sum(Generic[T]):
    """A field of `Totals`, read when all that was gathered is counted."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stats: Stats, owner: type) -> T:
        found: T = getattr(stats._aggregator.totals(), self._name)
        return found


class Stats:
    """The statistics of one version. The hot path updates them once per batch."""

    batches = _Sum[int]()
    answers = _Sum[Counter[int]]()
    batch_sizes = _Sum[Counter[int]]()
    latency = _Sum[Durations]()
    queue = _Sum[Durations]()
    batch_wait = _Sum[Durations]()
    preprocess = _Sum[Durations]()
    inference = _Sum[Durations]()
    postprocess = _Sum[Durations]()
    queue_seconds = _Sum[float]()
    busy_seconds = _Sum[float]()

    __slots__ = (
        "_aggregator",
        "_label_sets",
        "_serving",
        "_timed",
        "_times",
        "dropped_metrics",
        "ended",
        "error_log",
        "failed_refusals",
        "handler_metrics",
        "journal",
        "label",
        "newest",
        "recent",
        "recycled",
        "refusals",
        "restarts",
        "scalings",
        "stuck",
    )

    def __init__(self, label: str = "", serving: Serving | None = None) -> None:
        self.label = label  # as the log names it
        self.ended = 0  # requests that were accepted and are answered or refused
        self._serving: WeakSet[Serving] = WeakSet([] if serving is None else [serving])
        self.refusals: Counter[str] = Counter()  # by the name of the error class
        self.failed_refusals = 0  # see `is_failure`
        self._aggregator = BatchAggregator()
        self.newest: Batch | None = None
        self._timed: Batch | None = None
        self._times: BatchTimes | None = None  # of that
        self.recent = RecentRequests()
        self.restarts = 0
        self.scalings: Counter[str] = (
            Counter()
        )  # changes of the number of workers that the load made, by reason
        self.recycled: Counter[str] = (
            Counter()
        )  # workers that were replaced for their requests, memory, age or cores
        self.stuck: Counter[str] = (
            Counter()
        )  # workers that were killed because they were stopped or silent
        self.handler_metrics: dict[MetricKey, HandlerMetric] = {}
        self.dropped_metrics: Counter[str] = (
            Counter()
        )  # values that handlers reported and that are not kept, by the name of the metric
        self._label_sets: Counter[str] = (
            Counter()
        )  # in `handler_metrics`, by the name of the metric
        self.journal: MetricJournal | None = None  # where a metric log is written
        self.error_log = ErrorLog()  # what handlers raised and printed, and how workers ended

    def counts_for(self, serving: Serving) -> None:
        """For one more that serves the version."""
        self._serving.add(serving)

    @property
    def requests(self) -> int:
        """Accepted: counted when they end, many at a time, which costs nothing, and with those that
        have not.
        """
        return self.ended + sum(each.in_flight for each in self._serving)

    @property
    def errors(self) -> int:
        """Requests that failed, as `is_failure` says."""
        return self.failed_refusals + sum(
            count for status, count in self.answers.items() if is_failure(status)
        )

    @property
    def last_queue_seconds(self) -> float:
        """Of the newest batch: the wait of its request that came first."""
        newest = self.newest
        return 0.0 if newest is None else newest[1] - oldest(newest)

    @property
    def last_worker_seconds(self) -> float:
        """Of the newest batch, what TorchServe's thread for a worker is busy with: the way to it
        and back, and its wait there.
        """
        return 0.0 if self.newest is None else self.times(self.newest).way

    def add_batch(self, newest: Batch, jobs: Sequence[QueuedRequest]) -> None:
        """Once a batch, on the hot path: after its answers are written, in the same turn.

        `jobs`: in the order of a queue.
        """
        self.newest = newest
        answered, size = newest[2], newest[3]
        aggregator = self._aggregator
        rows = aggregator.rows
        rows += newest
        aggregator.room = room = aggregator.room - size - OF_A_BATCH
        if room < 0:
            aggregator.settle()
        job, recent = jobs[0], self.recent
        # those that are as urgent as each other are in the order in which they came
        first = (
            job.arrived
            if size == 1 or (job.deadline is None and job.priority == jobs[-1].priority)
            else oldest(newest)
        )
        if answered >= recent.due or answered - first > recent.threshold:
            recent.add(newest, b"\n".join([job.request_id for job in jobs]))
        if self.journal is not None:
            self.journal.add_batch(newest, [job.request_id for job in jobs])

    def add_late_batch(self, batch: Batch) -> None:
        """One whose requests were all refused while it ran: its worker was busy all the same."""
        times = times_of(batch)
        self._aggregator.totals().busy_seconds += times.answered - times.began

    def times(self, batch: Batch) -> BatchTimes:
        """Computed once for the requests of a batch."""
        if self._times is None or self._timed is not batch:
            self._timed, self._times = batch, times_of(batch)
        return self._times

    def keep(self, request_id: bytes, arrived: float, status: int, times: BatchTimes) -> None:
        """Remember this request, however many others there are. `times`: of its batch."""
        self.recent.asked.append(
            RequestRecord(request_id, arrived, status, times.total(arrived), times)
        )

    def point_out(self, trace_id: str, arrived: float, times: BatchTimes) -> None:
        """A request of this batch belongs to a trace that its caller keeps."""
        now = time.time()
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

    def add_refusal(self, job: QueuedRequest, error: TsxError, now: float) -> None:
        name = type(error).__name__
        self.refusals[name] += 1
        if is_failure(error):
            self.failed_refusals += 1
        self.recent.refused(
            RequestRecord(job.request_id, job.arrived, error.status, now - job.arrived, None, name)
        )

    def add_report(self, worker: str, facts: Mapping[str, Any]) -> None:
        """What a REPORT frame holds."""
        self.error_log.add_report(worker, facts)
        if metrics := facts.get("metrics"):
            self.add_handler_metrics(metrics)

    def add_handler_metrics(
        self, deltas: Collection[MetricDelta], jobs: Iterable[QueuedRequest] = ()
    ) -> None:
        """`jobs`: those of the batch that reported them, where it is known."""
        for delta in deltas:
            key = (
                delta["name"],
                delta["type"],
                delta["unit"],
                tuple(sorted(delta["dimensions"].items())),
            )
            metric = self.handler_metrics.get(key) or self._begin_metric(key)
            if metric is not None:
                metric.add(delta["value"])
        if self.journal is not None:  # only what is complete: the loop raises for what is not
            self.journal.add_values(deltas, [job.request_id for job in jobs])

    def _begin_metric(self, key: MetricKey) -> HandlerMetric | None:
        """None where a handler reports without bound, as one does whose labels hold ids: each would
        be kept for good.
        """
        name = key[0]
        if self._label_sets[name] < MOST_LABEL_SETS and (
            name in self._label_sets or len(self._label_sets) < MOST_METRICS
        ):
            self._label_sets[name] += 1
            metric = self.handler_metrics[key] = HandlerMetric(
                key[1], SHOWN if name.startswith(GENERATION) else VALUE_BOUNDS
            )
            return metric
        shown = name if name in self._label_sets else OTHERS
        if not self.dropped_metrics[shown]:
            many = (
                f"the metric {name} with more than {MOST_LABEL_SETS} sets of labels"
                if shown
                else f"more than {MOST_METRICS} metrics"
            )
            text = (
                "%s: its handler reports %s; further ones are dropped, and"
                " tsx_handler_metric_drops_total counts them"
            )
            logger.warning(text, self.label or "a model", many)
        self.dropped_metrics[shown] += 1
        return None
