"""The statistics of a version's requests: plain numbers that `/metrics` renders on demand."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from tsx_runtime.core.telemetry.aggregation import BATCH_COST_IN_REQUESTS, BatchAggregator
from tsx_runtime.core.telemetry.batch_times import Batch, BatchTimes, oldest, times_of
from tsx_runtime.core.telemetry.error_log import ErrorLog
from tsx_runtime.core.telemetry.histogram import SHOWN_BOUNDS, Durations, Exemplar
from tsx_runtime.core.telemetry.metric_journal import MetricJournal
from tsx_runtime.core.telemetry.recent_requests import RecentRequests, RequestRecord
from tsx_runtime.errors import TsxError, is_failure
from tsx_runtime.wire import MetricDelta

MAX_LABEL_SETS = 1000  # label sets per metric
MAX_METRICS = 1000  # metrics per version
OTHER_METRICS = ""  # replaces the names of metrics beyond MAX_METRICS
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# The bounds of handlers' histograms, as in TorchServe.
VALUE_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# The prefix of metrics about text generation. Tokens take little time, so these histograms have the
# finer bounds of the server's own metrics.
GENERATION = "tsx_generation_"
# The metric with which each worker reports the requests that wait for room in its engine.
WAITING_IN_WORKERS = f"{GENERATION}waiting_sequences"

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
        """The number of accepted requests that have not ended."""
        ...


class HandlerMetric:
    """A metric that a handler has reported.

    A gauge needs the last value, a counter the sum, and a histogram sum, count and buckets.
    """

    __slots__ = ("bounds", "buckets", "count", "last", "sum")

    def __init__(self, kind: str = "gauge", bounds: Sequence[float] = VALUE_BOUNDS) -> None:
        self.bounds = bounds
        # The counts of the buckets, which are not cumulative.
        self.buckets = [0] * (len(bounds) + 1) if kind == "histogram" else []
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
    """A field of `Totals`; before it is read, all batches are counted."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stats: Stats, owner: type) -> T:
        value: T = getattr(stats._aggregator.totals(), self._name)
        return value


class Stats:
    """The statistics of one version; the hot path updates them once per batch."""

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
        self.label = label  # name of the version in the log
        self.ended = 0  # number of accepted requests that were answered or refused
        self._serving: WeakSet[Serving] = WeakSet([] if serving is None else [serving])
        self.refusals: Counter[str] = Counter()  # refusals by error class
        self.failed_refusals = 0  # refusals that are failures, see `is_failure`
        self._aggregator = BatchAggregator()
        self.newest: Batch | None = None
        self._timed: Batch | None = None
        self._times: BatchTimes | None = None  # the times of `_timed`
        self.recent = RecentRequests()
        self.restarts = 0
        # Automatic changes of the number of workers, by reason.
        self.scalings: Counter[str] = Counter()
        # Workers that were recycled, by reason: requests, memory, age or cores.
        self.recycled: Counter[str] = Counter()
        # Workers that were killed because they were stuck, by reason: stopped or silent.
        self.stuck: Counter[str] = Counter()
        self.handler_metrics: dict[MetricKey, HandlerMetric] = {}
        # Reported values that were dropped, by the name of the metric.
        self.dropped_metrics: Counter[str] = Counter()
        # The number of label sets in `handler_metrics`, by the name of the metric.
        self._label_sets: Counter[str] = Counter()
        self.journal: MetricJournal | None = None  # set by `keep_journal`
        self.error_log = ErrorLog()  # errors and output of handlers, and ends of workers

    def keep_journal(self) -> None:
        """Keep the metrics of requests for the metric log."""
        self.journal = MetricJournal()

    def add_serving(self, serving: Serving) -> None:
        """Count the requests of another object that serves the version, too."""
        self._serving.add(serving)

    @property
    def requests(self) -> int:
        """The number of accepted requests: those that have ended, and those in flight.

        Accepting a request costs nothing, since requests are counted when they end, many at a time.
        """
        return self.ended + sum(serving.in_flight for serving in self._serving)

    @property
    def errors(self) -> int:
        """The number of failed requests; see `is_failure`."""
        return self.failed_refusals + sum(
            count for status, count in self.answers.items() if is_failure(status)
        )

    @property
    def last_queue_seconds(self) -> float:
        """The longest wait of a request in the newest batch."""
        newest = self.newest
        return 0.0 if newest is None else newest[1] - oldest(newest)

    @property
    def last_worker_seconds(self) -> float:
        """The seconds that TorchServe's thread for a worker would add to the worker's own."""
        return 0.0 if self.newest is None else self.times(self.newest).transit

    def add_batch(self, newest: Batch, jobs: Sequence[QueuedRequest]) -> None:
        """Add a batch on the hot path, right after its answers are written.

        `jobs` are in the order of a queue.
        """
        self.newest = newest
        answered, size = newest[2], newest[3]
        aggregator = self._aggregator
        rows = aggregator.rows
        rows += newest
        aggregator.room = room = aggregator.room - size - BATCH_COST_IN_REQUESTS
        if room < 0:
            aggregator.settle()
        job, recent = jobs[0], self.recent
        # If all requests are equally urgent, they are in the order of their arrival.
        first_arrival = (
            job.arrived
            if size == 1 or (job.deadline is None and job.priority == jobs[-1].priority)
            else oldest(newest)
        )
        if answered >= recent.due or answered - first_arrival > recent.threshold:
            recent.add(newest, b"\n".join([job.request_id for job in jobs]))
        if self.journal is not None:
            self.journal.add_batch(newest, [job.request_id for job in jobs])

    def add_late_batch(self, batch: Batch) -> None:
        """Add a batch whose requests were all refused while it ran: it kept a worker busy."""
        times = times_of(batch)
        self._aggregator.totals().busy_seconds += times.answered - times.began

    def times(self, batch: Batch) -> BatchTimes:
        """Return the times of a batch, which are computed once for all its requests."""
        if self._times is None or self._timed is not batch:
            self._timed, self._times = batch, times_of(batch)
        return self._times

    def remember(self, request_id: bytes, arrived: float, status: int, times: BatchTimes) -> None:
        """Remember this request at any rate of requests; `times` are those of its batch."""
        self.recent.always_remembered.append(
            RequestRecord(request_id, arrived, status, times.total(arrived), times)
        )

    def add_exemplar(self, trace_id: str, arrived: float, times: BatchTimes) -> None:
        """Record a traced request as an exemplar; its caller keeps the trace."""
        now = time.time()
        for durations, seconds in (
            (self.latency, times.total(arrived)),
            (self.queue, times.queue(arrived)),
            (self.batch_wait, times.wait(arrived)),
            (self.preprocess, times.preprocess),
            (self.inference, times.inference),
            (self.postprocess, times.postprocess),
        ):
            if seconds >= 0.0:  # A missing step is NaN.
                durations.add_exemplar(Exemplar(trace_id, seconds, now))

    def add_refusal(self, job: QueuedRequest, error: TsxError, now: float) -> None:
        name = type(error).__name__
        self.refusals[name] += 1
        if is_failure(error):
            self.failed_refusals += 1
        self.recent.add_refusal(
            RequestRecord(job.request_id, job.arrived, error.status, now - job.arrived, None, name)
        )

    def add_report(self, worker: str, facts: Mapping[str, Any]) -> None:
        """Add the content of a REPORT frame."""
        self.error_log.add_report(worker, facts)
        if metrics := facts.get("metrics"):
            self.add_handler_metrics(metrics)

    def add_handler_metrics(
        self, deltas: Collection[MetricDelta], jobs: Iterable[QueuedRequest] = ()
    ) -> None:
        """Add reported values; `jobs` is their batch, if it is known."""
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
        if self.journal is not None:
            # The journal only gets complete values, since the loop above raises for others.
            self.journal.add_values(deltas, [job.request_id for job in jobs])

    def _begin_metric(self, key: MetricKey) -> HandlerMetric | None:
        """Add a metric, or return None if a handler reports too many.

        Without a limit, labels with ids would fill the memory.
        """
        name = key[0]
        if self._label_sets[name] < MAX_LABEL_SETS and (
            name in self._label_sets or len(self._label_sets) < MAX_METRICS
        ):
            self._label_sets[name] += 1
            metric = self.handler_metrics[key] = HandlerMetric(
                key[1], SHOWN_BOUNDS if name.startswith(GENERATION) else VALUE_BOUNDS
            )
            return metric
        counted_name = name if name in self._label_sets else OTHER_METRICS
        if not self.dropped_metrics[counted_name]:
            excess_text = (
                f"the metric {name} with more than {MAX_LABEL_SETS} sets of labels"
                if counted_name
                else f"more than {MAX_METRICS} metrics"
            )
            text = (
                "%s: its handler reports %s; further ones are dropped, and"
                " tsx_handler_metric_drops_total counts them"
            )
            logger.warning(text, self.label or "a model", excess_text)
        self.dropped_metrics[counted_name] += 1
        return None
