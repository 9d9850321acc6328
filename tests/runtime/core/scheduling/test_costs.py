"""Properties of a queue whose batches have a limited cost or preferred sizes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.jobs import FakeJob
from tests.runtime.core.scheduling.test_batching import FakeWorker
from tsx_runtime.core.scheduling.batching import assign
from tsx_runtime.core.scheduling.costs import CostQueue, preferred_size
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits
from tsx_runtime.wire import BATCH_COST, MetricDelta, request_meta

NOW = 100.0
# The highest cost that is accepted from a client.
MAX_DECLARED_COST = 1000
jobs_of_cost = st.builds(
    lambda size, declared_cost, priority: FakeJob(
        cost_header(declared_cost), b"x" * size, priority=priority
    ),
    st.integers(0, 30),
    st.none() | st.integers(0, 50),
    st.sampled_from([0, 0, 0, 1]),
)
batch_limits = st.builds(
    BatchLimits,
    max_items=st.integers(1, 8),
    max_bytes=st.integers(1, 100),
    max_cost=st.integers(1, 60).map(float) | st.just(NEVER),
    buckets=st.lists(st.integers(1, 8), max_size=4).map(tuple),
)


def cost_header(cost: int | None = None) -> bytes:
    return request_meta("id", b"", [] if cost is None else [(b"X-Tsx-Cost", b"%d" % cost)])


def fill_queue(*jobs: FakeJob, rate: float = 1.0) -> CostQueue:
    queue = CostQueue(rate, MAX_DECLARED_COST)
    for job in jobs:
        queue.put(job, len(job.body))
    return queue


def cost_metrics(cost: float) -> list[MetricDelta]:
    return [
        {"name": BATCH_COST, "type": "counter", "unit": "count", "value": cost, "dimensions": {}}
    ]


@given(st.lists(jobs_of_cost, max_size=40), batch_limits)
def test_batches_contain_the_first_job_and_keep_the_limits(
    jobs: list[FakeJob], limits: BatchLimits
) -> None:
    queue = fill_queue(*jobs)
    remaining_jobs = list(queue.jobs)
    while queue.jobs:
        batch = queue.take(limits)
        assert batch[0] is remaining_jobs[0], (
            "each batch takes the first request, so that a request waits for at most as many"
            " batches as there were requests before it"
        )
        assert len(batch) <= limits.max_items
        assert len(batch) == 1 or sum(map(queue.cost, batch)) <= limits.max_cost
        assert len(batch) == 1 or sum(len(job.body) for job in batch) <= limits.max_bytes
        batch_ids = {id(job) for job in batch}
        remaining_jobs = [job for job in remaining_jobs if id(job) not in batch_ids]
        assert list(queue.jobs) == remaining_jobs, "the others keep their order"
        assert queue.size == sum(len(job.body) for job in remaining_jobs)


@given(st.lists(jobs_of_cost, min_size=1, max_size=40), batch_limits)
def test_a_batch_that_is_not_full_takes_all_jobs(jobs: list[FakeJob], limits: BatchLimits) -> None:
    limits = limits._replace(buckets=())
    queue = fill_queue(*jobs)
    if not queue.has_full_batch(limits):
        assert len(queue.take(limits)) == len(jobs)


@given(st.lists(jobs_of_cost, max_size=40), batch_limits)
def test_an_idle_worker_gets_a_batch_up_to_the_limits(
    jobs: list[FakeJob], limits: BatchLimits
) -> None:
    queue = fill_queue(*jobs)
    assert len(assign(queue, [FakeWorker()], NOW, limits._replace(wait=None)).batches) == min(
        len(jobs), 1
    )


def test_requests_of_similar_cost_share_a_batch() -> None:
    costs = [10, 90, 12, 95, 9]
    queue = fill_queue(*(FakeJob(cost_header(cost)) for cost in costs))
    limits = BatchLimits(max_items=3, max_cost=300.0)
    assert [[queue.cost(job) for job in queue.take(limits)] for _ in range(2)] == [
        [10, 12, 9],
        [90, 95],
    ]


def test_priority_precedes_similar_cost() -> None:
    queue = fill_queue(
        FakeJob(cost_header(10)),
        FakeJob(cost_header(90), priority=1),
        FakeJob(cost_header(80), priority=1),
    )
    assert [queue.cost(job) for job in queue.take(BatchLimits(max_items=2, max_cost=1000.0))] == [
        90,
        80,
    ]


def test_the_cost_per_byte_is_learned_from_workers() -> None:
    job = FakeJob(cost_header(), b"x" * 100)
    queue = fill_queue(job)
    assert queue.cost(job) == 100
    queue.learn([job, job], cost_metrics(50.0))
    assert queue.cost(job) == 25
    for _ in range(100):
        queue.learn([job], cost_metrics(10.0))
    assert queue.cost(job) == pytest.approx(10, abs=0.1)
    queue.learn([job], [])
    job.meta = cost_header(7)
    assert queue.cost(job) == 7, "the cost in a request's header precedes the learned one"


@pytest.mark.parametrize(
    ("max_cost", "declared_cost", "cost"),
    [
        (MAX_DECLARED_COST, 10**15 - 1, MAX_DECLARED_COST),
        (MAX_DECLARED_COST, 0, 1),
        (0, 10**15 - 1, 2),
    ],
)
def test_a_declared_cost_is_limited_to_a_full_batch(
    max_cost: int, declared_cost: int, cost: float
) -> None:
    assert CostQueue(1.0, max_cost).cost(FakeJob(cost_header(declared_cost), b"xy")) == cost


def test_token_costs_are_not_estimated_from_bytes() -> None:
    jobs = [
        FakeJob(cost_header(), b"x"),
        FakeJob(cost_header(), b"y"),
        FakeJob(cost_header(3)),
        FakeJob(cost_header(4)),
    ]
    queue = fill_queue(*jobs, rate=math.inf)
    limits = BatchLimits(max_items=8, max_cost=100.0)
    assert queue.has_full_batch(limits)
    assert [len(queue.take(limits)) for _ in range(3)] == [1, 1, 2]
    queue = fill_queue(*jobs, rate=math.inf)
    queue.learn(jobs[:1], cost_metrics(5.0))
    assert len(queue.take(limits)) == 4


@given(st.integers(1, 20), st.integers(0, 20), st.lists(st.integers(1, 16), max_size=6))
def test_a_preferred_size_delays_requests_by_at_most_one_batch(
    count: int, waiting_count: int, preferred_sizes: list[int]
) -> None:
    size = preferred_size(count, waiting_count, preferred_sizes)
    assert 0 < size <= count
    assert size == count or size in preferred_sizes
    if not waiting_count and size < count:
        assert preferred_size(count - size, 0, preferred_sizes) == count - size


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(8, [8]), (5, [4, 1]), (6, [4, 2]), (7, [7]), (19, [8, 8, 2, 1]), (3, [2, 1])],
)
def test_batches_have_preferred_sizes(count: int, sizes: list[int]) -> None:
    queue = fill_queue(*(FakeJob() for _ in range(count)))
    limits = BatchLimits(max_items=8, buckets=(1, 2, 4, 8))
    assert [len(queue.take(limits)) for _ in sizes] == sizes
    assert not queue.jobs
