"""Batches and the queue, tested as properties with plain job objects and a numeric clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.jobs import NOW, FakeJob
from tsx_runtime.core.scheduling.batching import assign, halves, split_unstarted
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue, Suspects, urgency


@dataclass(eq=False)
class FakeWorker:
    batches: int = 0
    prefetch: bool = False
    has_suspects: bool = False


def make_jobs(**strategies):
    return st.builds(
        FakeJob, body=st.binary(max_size=20), arrived=st.floats(NOW - 10, NOW), **strategies
    )


plain_jobs = make_jobs(gone=st.booleans())
urgent_jobs = make_jobs(
    gone=st.booleans(),
    deadline=st.none() | st.floats(NOW - 1, NOW + 1),
    priority=st.sampled_from([0, 0, 0, -1, 2]),
)
queues = st.lists(plain_jobs, max_size=40) | st.lists(urgent_jobs, max_size=40)
workers = st.lists(
    st.builds(
        FakeWorker, batches=st.integers(0, 2), prefetch=st.booleans(), has_suspects=st.booleans()
    ),
    max_size=5,
)
limits = st.builds(
    BatchLimits,
    max_items=st.integers(1, 8),
    max_bytes=st.integers(1, 60),
    wait=st.none() | st.floats(0, 10),
)


def fill_queue(jobs) -> RequestQueue:
    """Fill a queue as the dispatcher does, before some clients leave."""
    queue = RequestQueue(jobs)
    for job in jobs:
        if job.gone:
            queue.leave(job)
    return queue


def is_over(job: FakeJob) -> bool:
    return job.gone or (job.deadline is not None and job.deadline <= NOW)


def sorted_ids(jobs) -> list[int]:
    return sorted(map(id, jobs))


@given(queues, workers, limits)
def test_batches_keep_order_and_limits_and_lose_no_job(queued_jobs, idle, batch_limits):
    queue = fill_queue(queued_jobs)
    result = assign(queue, idle, NOW, batch_limits)
    batches = [batch for _, batch in result.batches]
    sent_jobs = [job for batch in batches for job in batch]
    assert sorted_ids([*sent_jobs, *result.skipped, *queue.jobs]) == sorted_ids(queued_jobs)
    # Jobs of equal urgency keep their order of arrival.
    assert [*sent_jobs, *queue.jobs] == sorted(
        (job for job in queued_jobs if not is_over(job)), key=urgency
    )
    assert queue.size == sum(len(job.body) for job in queue.jobs)
    for batch in batches:
        assert 1 <= len(batch) <= batch_limits.max_items
        assert len(batch) == 1 or sum(len(job.body) for job in batch) <= batch_limits.max_bytes
    deadlines = [job.deadline for job in queue.jobs if job.deadline is not None]
    assert NOW < result.wake_at <= min(deadlines, default=NEVER)


@given(queues, workers, st.integers(1, 8))
def test_no_request_waits_while_a_worker_is_idle(queued_jobs, idle, size):
    queue = fill_queue(queued_jobs)
    result = assign(queue, idle, NOW, BatchLimits(size))
    busy_ids = {id(worker) for worker, _ in result.batches}
    assert not (
        queue.jobs and any(worker.batches == 0 and id(worker) not in busy_ids for worker in idle)
    )


@given(
    queues,
    st.lists(st.builds(FakeWorker, batches=st.integers(1, 3)), min_size=2, max_size=5),
    limits,
)
def test_with_several_workers_busy_ones_get_no_batch_ahead(queued_jobs, busy, batch_limits):
    assert not assign(fill_queue(queued_jobs), busy, NOW, batch_limits).batches


@given(queues, workers.filter(lambda some_workers: len(some_workers) > 1), limits)
def test_a_busy_prefetching_worker_gets_a_full_batch_if_none_is_idle(
    queued_jobs, some_workers, batch_limits
):
    queue = fill_queue(queued_jobs)
    batches = assign(queue, some_workers, NOW, batch_limits).batches
    sent_ahead = [
        (index, worker, batch) for index, (worker, batch) in enumerate(batches) if worker.batches
    ]
    for index, worker, batch in sent_ahead:
        assert (worker.batches, worker.prefetch, worker.has_suspects) == (1, True, False)
        following_jobs = [
            *(job for _, later_batch in batches[index + 1 :] for job in later_batch),
            *queue.jobs,
        ]
        next_size = len(following_jobs[0].body) if following_jobs else 1
        assert (
            len(batch) == batch_limits.max_items
            or sum(len(job.body) for job in batch) + next_size > batch_limits.max_bytes
        )
    if sent_ahead:
        assert all(
            any(worker is used_worker for used_worker, _ in batches)
            for worker in some_workers
            if not worker.batches
        )
    assert len({id(worker) for worker, _ in batches}) == len(batches)


@given(queues, limits)
def test_no_batch_is_sent_ahead_to_a_worker_with_suspects(queued_jobs, batch_limits):
    for count in range(3):
        some_workers = [
            FakeWorker(batches=1, prefetch=True, has_suspects=True) for _ in range(count + 1)
        ]
        assert not assign(fill_queue(queued_jobs), some_workers, NOW, batch_limits).batches


@given(st.lists(plain_jobs, min_size=1, max_size=8))
def test_prefetched_requests_of_a_dead_worker_are_suspects(jobs):
    groups = split_unstarted(jobs)
    assert [job for group in groups for job in group.jobs] == jobs
    assert all(group.deaths == 1 for group in groups)
    assert len(groups) == min(2, len(jobs))


@given(queues, limits)
def test_a_single_busy_worker_gets_only_a_full_batch_ahead(queued_jobs, batch_limits):
    queue = fill_queue(queued_jobs)
    for _, batch in assign(queue, [FakeWorker(batches=1)], NOW, batch_limits).batches:
        next_size = len(queue.jobs[0].body) if queue.jobs else 1
        assert (
            len(batch) == batch_limits.max_items
            or sum(len(job.body) for job in batch) + next_size > batch_limits.max_bytes
        )
    assert not assign(fill_queue(queued_jobs), [FakeWorker(batches=2)], NOW, batch_limits).batches


@given(
    st.lists(st.floats(NOW - 10, NOW), min_size=1, max_size=20), st.integers(1, 8), st.floats(0, 10)
)
def test_a_batch_never_waits_longer_than_max_batch_delay(arrivals, size, wait):
    queue = fill_queue([FakeJob(arrived=arrival) for arrival in sorted(arrivals)])
    result = assign(queue, [FakeWorker()], NOW, BatchLimits(size, wait=wait))
    if result.batches:
        assert len(arrivals) >= size or min(arrivals) + wait <= NOW
    else:
        assert result.wake_at == min(arrivals) + wait
        assert result.wake_at > NOW


@given(st.lists(urgent_jobs, min_size=1, max_size=10), st.floats(0, 10))
def test_a_batch_waits_at_most_half_of_a_requests_time(queued_jobs, wait):
    queue = fill_queue(queued_jobs)
    wake_time = assign(queue, [FakeWorker()], NOW, BatchLimits(100, wait=wait)).wake_at
    for job in queue.jobs:
        assert wake_time <= job.arrived + wait
        assert job.deadline is None or wake_time <= (job.arrived + job.deadline) / 2


def test_a_batch_at_its_byte_limit_does_not_wait():
    queue = fill_queue([FakeJob(body=b"12345"), FakeJob(body=b"67890")])
    [(_, batch)] = assign(
        queue, [FakeWorker()], NOW, BatchLimits(8, max_bytes=7, wait=10.0)
    ).batches
    assert len(batch) == 1


@given(st.lists(urgent_jobs, max_size=30), st.lists(urgent_jobs, max_size=30), st.integers(0, 8))
def test_requeued_requests_regain_their_places(early_jobs, late_jobs, size):
    queue = RequestQueue(early_jobs)
    taken_jobs = queue.take(BatchLimits(size or 1)) if early_jobs else []
    for job in late_jobs:
        queue.put(job, len(job.body))
    queue.put_back(taken_jobs)
    assert list(queue.jobs) == sorted([*early_jobs, *late_jobs], key=urgency)
    assert queue.size == sum(len(job.body) for job in queue.jobs)
    assert queue.earliest_deadline <= min(
        (job.deadline for job in queue.jobs if job.deadline is not None), default=NEVER
    )


@given(st.lists(urgent_jobs, max_size=30), st.integers(1, 8))
def test_the_queue_is_ordered_only_while_a_request_has_a_priority_or_a_deadline(queued_jobs, size):
    queue = RequestQueue(queued_jobs)
    assert queue.is_ordered == any(job.deadline is not None or job.priority for job in queued_jobs)
    while queue.jobs:
        queue.take(BatchLimits(size))
    assert (queue.size, queue.is_ordered, queue.earliest_deadline) == (0, False, NEVER)


@given(queues, workers, limits, st.booleans())
def test_no_batch_is_sent_ahead_if_a_request_has_a_deadline_or_priority(
    queued_jobs, some_workers, batch_limits, send_ahead
):
    batches = assign(fill_queue(queued_jobs), some_workers, NOW, batch_limits, send_ahead).batches
    if any(job.deadline is not None or job.priority for job in queued_jobs):
        assert all(worker.batches == 0 for worker, _ in batches)
    assert len({id(worker) for worker, _ in batches}) == len(batches)


@given(queues, workers, limits)
def test_long_batches_are_sent_ahead_only_to_prefetching_workers(
    queued_jobs, some_workers, batch_limits
):
    assert all(
        worker.batches == 0 or worker.prefetch
        for worker, _ in assign(
            fill_queue(queued_jobs), some_workers, NOW, batch_limits, allow_early=False
        ).batches
    )


@given(st.lists(st.lists(urgent_jobs, min_size=1, max_size=5), max_size=4), queues, workers)
def test_suspects_go_first_to_idle_workers_and_only_with_each_other(groups, queued_jobs, idle):
    queue = fill_queue(queued_jobs)
    queue.suspect(Suspects(group, 1) for group in groups)
    for job in (job for group in groups for job in group if job.gone):
        queue.leave(job)
    result = assign(queue, idle, NOW, BatchLimits(4))
    suspect_jobs = [job for group in queue.suspects for job in group.jobs]
    sent_jobs = [job for _, group in result.retries for job in group.jobs] + [
        job for _, batch in result.batches for job in batch
    ]
    assert sorted_ids([*sent_jobs, *result.skipped, *queue.jobs, *suspect_jobs]) == sorted_ids(
        [*queued_jobs, *(job for group in groups for job in group)]
    )
    assert not any(is_over(job) for job in [*sent_jobs, *suspect_jobs])
    assert all(worker.batches == 0 for worker, _ in result.retries)
    assert all(
        any(set(map(id, group.jobs)) <= set(map(id, original_group)) for original_group in groups)
        for _, group in result.retries
    )
    used_workers = [worker for worker, _ in (*result.retries, *result.batches)]
    assert len(set(map(id, used_workers))) == len(used_workers)
    if queue.suspects:
        assert all(
            worker.batches or any(worker is used_worker for used_worker in used_workers)
            for worker in idle
        )


@given(st.integers(1, 70), st.data())
def test_a_request_that_kills_workers_is_found_after_three_deaths(count, data):
    all_jobs = [FakeJob() for _ in range(count)]
    killer = data.draw(st.sampled_from(all_jobs))
    pending, answered_jobs, deaths = [Suspects(all_jobs, 0)], [], 0
    while pending:
        group = pending.pop()
        if killer in group.jobs:
            deaths += 1
            pending += halves(group)
        else:
            answered_jobs += group.jobs
    assert deaths <= 3
    assert sorted_ids(answered_jobs) == sorted_ids(job for job in all_jobs if job is not killer)


@dataclass
class Worker:
    """A worker that takes a while per batch, on the test's clock."""

    prefetch: bool
    free_at: deque[float] = field(default_factory=deque)
    has_suspects: bool = False

    @property
    def batches(self) -> int:
        return len(self.free_at)


@given(
    st.lists(st.tuples(st.floats(0, 0.5), urgent_jobs), max_size=40),
    st.lists(st.booleans(), min_size=1, max_size=3),
    st.floats(0.01, 2),
    st.builds(
        BatchLimits,
        max_items=st.integers(1, 4),
        max_bytes=st.integers(10, 60),
        wait=st.none() | st.floats(0, 1),
    ),
)
def test_every_request_ends_once_and_in_time(arrivals, prefetching, seconds, batch_limits):
    """Simulate arrivals, replies, and the wake-up times that `assign` requests."""
    queue, pool = RequestQueue(), [Worker(prefetch) for prefetch in prefetching]
    now, wake_time, ended_jobs, pending = NOW, NEVER, [], []
    for gap, job in arrivals:
        job.arrived = (pending[-1].arrived if pending else NOW) + gap
        job.deadline = (
            None if job.deadline is None else job.arrived + abs(job.deadline - NOW) + 0.001
        )
        pending.append(job)
    pending = deque(pending)
    while pending or queue.jobs or any(worker.free_at for worker in pool):
        events = (
            [worker.free_at[0] for worker in pool if worker.free_at]
            + [wake_time]
            + ([pending[0].arrived] if pending else [])
        )
        now = min(events)
        assert not math.isinf(now), "requests wait, and nothing will ever happen"
        while pending and pending[0].arrived <= now:
            job = pending.popleft()
            queue.put(job, len(job.body))
        for worker in pool:
            if worker.free_at and worker.free_at[0] <= now:
                worker.free_at.popleft()
        result = assign(queue, pool, now, batch_limits)
        wake_time = result.wake_at
        for worker, batch in result.batches:
            worker.free_at.append(max(now, worker.free_at[-1] if worker.free_at else now) + seconds)
            assert not any(job.deadline is not None and job.deadline < now for job in batch)
            ended_jobs += batch
        ended_jobs += result.skipped
        assert all(job.deadline is None or job.deadline > now for job in queue.jobs)
        assert not (
            batch_limits.wait is None and queue.jobs and not all(worker.batches for worker in pool)
        )
    assert sorted_ids(ended_jobs) == sorted_ids(job for _, job in arrivals)
