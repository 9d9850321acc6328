"""The counts of batches, which are the same for requests alone and in company."""

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

# More batches of one request than are counted at a time.
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
def test_a_request_counts_the_same_alone_and_in_company(
    arrived: list[float],
    after: tuple[float, float, float],
    began: float,
    reported: tuple[float, float, float],
    data: st.DataObject,
) -> None:
    points = _, sent, answered = 100 + after[0], 103 + after[1], 106 + after[2]
    statuses = data.draw(
        st.lists(
            st.sampled_from([200, 200, 418, 503]), min_size=len(arrived), max_size=len(arrived)
        )
    )
    jobs = [FakeJob(b"%d" % number, arrived=100 + at) for number, at in enumerate(arrived)]
    together, apart = Stats(), Stats()
    of_worker = TIMES.pack(sent + began / 3, 0.5, *reported)
    count(together, points, jobs, of_worker, statuses if set(statuses) != {200} else None)
    for job, status in zip(jobs, statuses, strict=True):
        count(apart, points, [job], of_worker, [status] if status != 200 else None)
    for name in ("latency", "queue", "batch_wait"):
        durations, durations_apart = getattr(together, name), getattr(apart, name)
        assert durations.count == durations_apart.count, name
        assert abs(durations.sum - durations_apart.sum) < 1e-9, name
    assert together.answers == apart.answers
    assert together.errors == apart.errors == sum(status >= 500 for status in statuses)
    assert abs(together.queue_seconds - apart.queue_seconds) < 1e-9
    assert (together.batches, apart.batches) == (1, len(jobs))
    assert together.preprocess.count * len(jobs) == apart.preprocess.count
    assert together.inference.count * len(jobs) == apart.inference.count
    for job, status in zip(jobs, statuses, strict=True):
        records = together.recent.find(job.request_id), apart.recent.find(job.request_id)
        assert [(seen.status, seen.took) for seen in records if seen is not None] == [
            (status, answered - job.arrived)
        ] * 2


anything = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.lists(st.lists(moments, min_size=1, max_size=4), min_size=1, max_size=12),
    st.tuples(moments, moments, moments),
    st.tuples(*[st.one_of(anything, moments, moments.map(lambda at: 103 + at))] * 5),
)
def test_many_batches_are_counted_as_each_would_be_whatever_their_workers_tell(
    batches: list[list[float]], points: tuple[float, float, float], reported: tuple[float, ...]
) -> None:
    free, sent, answered = 100 + points[0], 103 + points[1], 106 + points[2]
    stats, seconds = Stats(), defaultdict[str, list[float]](list)
    for arrived in batches:
        jobs = [FakeJob(arrived=100 + at) for at in arrived]
        count(stats, (free, sent, answered), jobs, TIMES.pack(*reported))
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
def test_the_oldest_request_of_a_batch_is_seen_to_be_slow(
    waiting: list[tuple[float, Any]], most: int
) -> None:
    queue = RequestQueue()
    for at, (deadline, priority) in sorted(waiting, key=itemgetter(0)):
        queue.put(FakeJob(arrived=at, deadline=deadline, priority=priority), 1)
    while queue.jobs:
        jobs = queue.take(BatchLimits(max_items=most))
        longest = 5.0 - min(job.arrived for job in jobs)
        for threshold, is_slow in ((longest - 1e-6, True), (longest, False)):
            stats = Stats()
            stats.recent.due, stats.recent.threshold = math.inf, threshold
            count(stats, (4.0, 4.0, 5.0), jobs)
            assert bool(stats.recent.slowest()) == is_slow


def test_the_time_of_a_workers_thread_is_what_a_batch_takes_beside_the_worker() -> None:
    stats = Stats()
    assert stats.last_worker_seconds == 0
    count(
        stats,
        (10.0, 10.0, 12.0),
        [FakeJob(arrived=9.0)],
        TIMES.pack(10.5, 1.25, math.nan, 1.25, math.nan),
    )
    assert stats.last_worker_seconds == 0.75


def test_more_batches_than_are_counted_at_a_time_are_counted_from_whatever_thread() -> None:
    stats, threads = Stats(), 4
    job = FakeJob(arrived=1.0)
    newest = batch_of((1.0, 1.0, 2.0), [job])
    done = threading.Event()
    seen: list[list[int]] = [[] for _ in range(threads)]

    def look(counts: list[int]) -> None:
        while not done.is_set():
            counts.append(stats.answers[200])

    readers = [threading.Thread(target=look, args=(counts,)) for counts in seen]
    for reader in readers:
        reader.start()
    for _ in range(5 * MANY + 7):
        stats.add_batch(newest, [job])
    done.set()
    for reader in readers:
        reader.join()
    assert all(counts == sorted(counts) for counts in seen), "a count went back"
    assert stats.answers == {200: 5 * MANY + 7}
    assert stats.latency.count == stats.batches == 5 * MANY + 7


def test_a_metric_that_is_incomplete_is_not_logged() -> None:
    stats = Stats()
    stats.journal = MetricJournal()
    good = {"name": "n", "type": "gauge", "unit": "count", "dimensions": {}, "value": 1.0}
    report: dict[str, Any] = {"errors": [], "lines": [], "lost": 0}
    with pytest.raises(KeyError):
        stats.add_report("1", {**report, "metrics": [good, {"name": "n"}]})
    assert not len(stats.journal)
    stats.add_report("1", {**report, "metrics": [good]})
    assert len(stats.journal) == 1
