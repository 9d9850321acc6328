"""The statistics of requests, which do not depend on how requests are batched."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.jobs import FakeJob
from tests.support.batches import batch_of, count
from tsx_runtime.core.scheduling.queue import BatchLimits, RequestQueue
from tsx_runtime.core.telemetry.aggregation import BATCH_COST_IN_REQUESTS, MAX_UNCOUNTED
from tsx_runtime.core.telemetry.batch_times import NAN, times_of
from tsx_runtime.core.telemetry.metric_journal import MetricJournal
from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.wire import TIMES

# More single-request batches than are counted at once.
MANY = MAX_UNCOUNTED // BATCH_COST_IN_REQUESTS
moments = st.floats(0, 3)
steps = st.sampled_from([NAN, 0.0, 0.25, 7.0])


@given(
    st.lists(moments, min_size=2, max_size=8),
    st.tuples(moments, moments, moments),
    moments,
    st.tuples(steps, steps, steps),
    st.data(),
)
def test_a_request_counts_the_same_in_any_batch(
    arrived: list[float],
    offsets: tuple[float, float, float],
    start_offset: float,
    worker_times: tuple[float, float, float],
    data: st.DataObject,
) -> None:
    points = _, sent_at, answered_at = 100 + offsets[0], 103 + offsets[1], 106 + offsets[2]
    statuses = data.draw(
        st.lists(
            st.sampled_from([200, 200, 418, 503]), min_size=len(arrived), max_size=len(arrived)
        )
    )
    jobs = [FakeJob(b"%d" % number, arrived=100 + offset) for number, offset in enumerate(arrived)]
    batched_stats, single_stats = Stats(), Stats()
    of_worker = TIMES.pack(sent_at + start_offset / 3, 0.5, *worker_times)
    count(batched_stats, points, jobs, of_worker, statuses if set(statuses) != {200} else None)
    for job, status in zip(jobs, statuses, strict=True):
        count(single_stats, points, [job], of_worker, [status] if status != 200 else None)
    for name in ("latency", "queue", "batch_wait"):
        durations, durations_apart = getattr(batched_stats, name), getattr(single_stats, name)
        assert durations.count == durations_apart.count, name
        assert abs(durations.sum - durations_apart.sum) < 1e-9, name
    assert batched_stats.answers == single_stats.answers
    assert batched_stats.errors == single_stats.errors == sum(status >= 500 for status in statuses)
    assert abs(batched_stats.queue_seconds - single_stats.queue_seconds) < 1e-9
    assert (batched_stats.batches, single_stats.batches) == (1, len(jobs))
    assert batched_stats.preprocess.count * len(jobs) == single_stats.preprocess.count
    assert batched_stats.inference.count * len(jobs) == single_stats.inference.count
    for job, status in zip(jobs, statuses, strict=True):
        records = (
            batched_stats.recent.find(job.request_id),
            single_stats.recent.find(job.request_id),
        )
        assert [(record.status, record.took) for record in records if record is not None] == [
            (status, answered_at - job.arrived)
        ] * 2


anything = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.lists(st.lists(moments, min_size=1, max_size=4), min_size=1, max_size=12),
    st.tuples(moments, moments, moments),
    st.tuples(*[st.one_of(anything, moments, moments.map(lambda offset: 103 + offset))] * 5),
)
def test_deferred_counting_equals_counting_each_batch(
    batches: list[list[float]], points: tuple[float, float, float], worker_times: tuple[float, ...]
) -> None:
    free_at, sent_at, answered_at = 100 + points[0], 103 + points[1], 106 + points[2]
    stats, seconds = Stats(), defaultdict[str, list[float]](list)
    for arrived in batches:
        jobs = [FakeJob(arrived=100 + offset) for offset in arrived]
        count(stats, (free_at, sent_at, answered_at), jobs, TIMES.pack(*worker_times))
        assert stats.newest is not None
        times = times_of(stats.newest)
        seconds["busy"].append(times.answered - times.began)
        for name in ("preprocess", "inference", "postprocess"):
            if getattr(times, name) >= 0:
                seconds[name].append(getattr(times, name))
        for job in jobs:
            seconds["latency"].append(times.total(job.arrived))
            seconds["queue"].append(times.queue(job.arrived))
            seconds["batch_wait"].append(times.wait(job.arrived))
    for name in ("latency", "queue", "batch_wait", "preprocess", "inference", "postprocess"):
        durations = getattr(stats, name)
        assert durations.count == len(seconds[name]), name
        assert durations.sum == pytest.approx(sum(seconds[name]), abs=1e-6), name
    assert stats.batches == len(batches)
    assert stats.batch_sizes == Counter(map(len, batches))
    assert stats.answers == {200: sum(map(len, batches))}
    assert stats.busy_seconds == pytest.approx(sum(seconds["busy"]))


urgencies = st.sampled_from(
    [(None, 0), (None, 0), (None, 1), (None, -1), (101.0, 0), (102.0, 0), (101.0, 1)]
)


@given(st.lists(st.tuples(moments, urgencies), min_size=1, max_size=12), st.integers(1, 6))
def test_the_oldest_request_of_a_batch_is_recognized_as_slow(
    arrivals: list[tuple[float, Any]], batch_size: int
) -> None:
    queue = RequestQueue()
    for offset, (deadline, priority) in sorted(arrivals, key=itemgetter(0)):
        queue.put(FakeJob(arrived=offset, deadline=deadline, priority=priority), 1)
    while queue.jobs:
        jobs = queue.take(BatchLimits(max_items=batch_size))
        longest_wait = 5.0 - min(job.arrived for job in jobs)
        for threshold, is_slow in ((longest_wait - 1e-6, True), (longest_wait, False)):
            stats = Stats()
            stats.recent.due, stats.recent.threshold = math.inf, threshold
            count(stats, (4.0, 4.0, 5.0), jobs)
            assert bool(stats.recent.slowest()) == is_slow


def test_worker_seconds_exclude_the_reported_handler_time() -> None:
    stats = Stats()
    assert stats.last_worker_seconds == 0
    count(
        stats,
        (10.0, 10.0, 12.0),
        [FakeJob(arrived=9.0)],
        TIMES.pack(10.5, 1.25, math.nan, 1.25, math.nan),
    )
    assert stats.last_worker_seconds == 0.75


def test_all_batches_are_counted_from_any_thread() -> None:
    stats, threads = Stats(), 4
    job = FakeJob(arrived=1.0)
    newest_batch = batch_of((1.0, 1.0, 2.0), [job])
    counting_done = threading.Event()
    counts_by_thread: list[list[int]] = [[] for _ in range(threads)]

    def read_counts(counts: list[int]) -> None:
        while not counting_done.is_set():
            counts.append(stats.answers[200])

    readers = [threading.Thread(target=read_counts, args=(counts,)) for counts in counts_by_thread]
    for reader in readers:
        reader.start()
    for _ in range(5 * MANY + 7):
        stats.add_batch(newest_batch, [job])
    counting_done.set()
    for reader in readers:
        reader.join()
    assert all(counts == sorted(counts) for counts in counts_by_thread), "a count went back"
    assert stats.answers == {200: 5 * MANY + 7}
    assert stats.latency.count == stats.batches == 5 * MANY + 7


def test_an_incomplete_metric_is_not_logged() -> None:
    stats = Stats()
    stats.journal = MetricJournal()
    complete_metric = {
        "name": "n",
        "type": "gauge",
        "unit": "count",
        "dimensions": {},
        "value": 1.0,
    }
    report: dict[str, Any] = {"errors": [], "lines": [], "lost": 0}
    with pytest.raises(KeyError):
        stats.add_report("1", {**report, "metrics": [complete_metric, {"name": "n"}]})
    assert not len(stats.journal)
    stats.add_report("1", {**report, "metrics": [complete_metric]})
    assert len(stats.journal) == 1
