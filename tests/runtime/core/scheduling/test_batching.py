"""Batches and the queue as properties: jobs are plain data, and the clock is a number."""

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


def make_jobs(**kinds):
    return st.builds(
        FakeJob, body=st.binary(max_size=20), arrived=st.floats(NOW - 10, NOW), **kinds
    )


plain = make_jobs(gone=st.booleans())
urgent = make_jobs(
    gone=st.booleans(),
    deadline=st.none() | st.floats(NOW - 1, NOW + 1),
    priority=st.sampled_from([0, 0, 0, -1, 2]),
)
queues = st.lists(plain, max_size=40) | st.lists(urgent, max_size=40)
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
def test_batches_keep_the_order_and_the_caps_and_no_job_is_lost(queued, idle, caps):
    queue = fill_queue(queued)
    result = assign(queue, idle, NOW, caps)
    batches = [batch for _, batch in result.batches]
    sent = [job for batch in batches for job in batch]
    assert sorted_ids([*sent, *result.skipped, *queue.jobs]) == sorted_ids(queued)
    # Jobs of equal urgency keep the order in which they came.
    assert [*sent, *queue.jobs] == sorted((job for job in queued if not is_over(job)), key=urgency)
    assert queue.size == sum(len(job.body) for job in queue.jobs)
    for batch in batches:
        assert 1 <= len(batch) <= caps.max_items
        assert len(batch) == 1 or sum(len(job.body) for job in batch) <= caps.max_bytes
    deadlines = [job.deadline for job in queue.jobs if job.deadline is not None]
    assert NOW < result.wake_at <= min(deadlines, default=NEVER)


@given(queues, workers, st.integers(1, 8))
def test_no_request_waits_while_a_worker_is_idle(queued, idle, size):
    queue = fill_queue(queued)
    result = assign(queue, idle, NOW, BatchLimits(size))
    busy = {id(worker) for worker, _ in result.batches}
    assert not (
        queue.jobs and any(worker.batches == 0 and id(worker) not in busy for worker in idle)
    )


@given(
    queues,
    st.lists(st.builds(FakeWorker, batches=st.integers(1, 3)), min_size=2, max_size=5),
    limits,
)
def test_with_several_workers_a_busy_one_gets_nothing_early(queued, busy, caps):
    assert not assign(fill_queue(queued), busy, NOW, caps).batches


@given(queues, workers.filter(lambda some: len(some) > 1), limits)
def test_a_busy_worker_that_prepares_ahead_gets_a_full_batch_once_no_other_is_idle(
    queued, some, caps
):
    queue = fill_queue(queued)
    batches = assign(queue, some, NOW, caps).batches
    early = [
        (index, worker, batch) for index, (worker, batch) in enumerate(batches) if worker.batches
    ]
    for index, worker, batch in early:
        assert (worker.batches, worker.prefetch, worker.has_suspects) == (1, True, False)
        behind = [*(job for _, later in batches[index + 1 :] for job in later), *queue.jobs]
        following = len(behind[0].body) if behind else 1
        assert (
            len(batch) == caps.max_items
            or sum(len(job.body) for job in batch) + following > caps.max_bytes
        )
    if early:
        assert all(
            any(worker is user for user, _ in batches) for worker in some if not worker.batches
        )
    assert len({id(worker) for worker, _ in batches}) == len(batches)


@given(queues, limits)
def test_nothing_is_sent_early_behind_requests_with_which_a_worker_died(queued, caps):
    for count in range(3):
        some = [FakeWorker(batches=1, prefetch=True, has_suspects=True) for _ in range(count + 1)]
        assert not assign(fill_queue(queued), some, NOW, caps).batches


@given(st.lists(plain, min_size=1, max_size=8))
def test_requests_that_were_prepared_when_a_worker_died_are_suspected_too(jobs):
    groups = split_unstarted(jobs)
    assert [job for group in groups for job in group.jobs] == jobs
    assert all(group.deaths == 1 for group in groups)
    assert len(groups) == min(2, len(jobs))


@given(queues, limits)
def test_a_single_busy_worker_gets_one_more_batch_only_when_nobody_could_join_it(queued, caps):
    queue = fill_queue(queued)
    for _, batch in assign(queue, [FakeWorker(batches=1)], NOW, caps).batches:
        following = len(queue.jobs[0].body) if queue.jobs else 1
        assert (
            len(batch) == caps.max_items
            or sum(len(job.body) for job in batch) + following > caps.max_bytes
        )
    assert not assign(fill_queue(queued), [FakeWorker(batches=2)], NOW, caps).batches


@given(
    st.lists(st.floats(NOW - 10, NOW), min_size=1, max_size=20), st.integers(1, 8), st.floats(0, 10)
)
def test_a_model_that_waits_for_company_never_waits_longer_than_it_said(arrivals, size, wait):
    queue = fill_queue([FakeJob(arrived=at) for at in sorted(arrivals)])
    result = assign(queue, [FakeWorker()], NOW, BatchLimits(size, wait=wait))
    if result.batches:
        assert len(arrivals) >= size or min(arrivals) + wait <= NOW
    else:
        assert result.wake_at == min(arrivals) + wait
        assert result.wake_at > NOW


@given(st.lists(urgent, min_size=1, max_size=10), st.floats(0, 10))
def test_waiting_for_company_leaves_each_request_half_of_its_time(queued, wait):
    queue = fill_queue(queued)
    wake = assign(queue, [FakeWorker()], NOW, BatchLimits(100, wait=wait)).wake_at
    for job in queue.jobs:
        assert wake <= job.arrived + wait
        assert job.deadline is None or wake <= (job.arrived + job.deadline) / 2


def test_a_batch_that_is_full_by_bytes_does_not_wait_for_company():
    queue = fill_queue([FakeJob(body=b"12345"), FakeJob(body=b"67890")])
    [(_, batch)] = assign(
        queue, [FakeWorker()], NOW, BatchLimits(8, max_bytes=7, wait=10.0)
    ).batches
    assert len(batch) == 1


@given(st.lists(urgent, max_size=30), st.lists(urgent, max_size=30), st.integers(0, 8))
def test_requests_that_are_put_back_get_their_old_places(early, late, size):
    queue = RequestQueue(early)
    taken = queue.take(BatchLimits(size or 1)) if early else []
    for job in late:
        queue.put(job, len(job.body))
    queue.put_back(taken)
    assert list(queue.jobs) == sorted([*early, *late], key=urgency)
    assert queue.size == sum(len(job.body) for job in queue.jobs)
    assert queue.earliest_deadline <= min(
        (job.deadline for job in queue.jobs if job.deadline is not None), default=NEVER
    )


@given(st.lists(urgent, max_size=30), st.integers(1, 8))
def test_the_queue_is_ordered_only_while_a_request_has_a_priority_or_a_deadline(queued, size):
    queue = RequestQueue(queued)
    assert queue.is_ordered == any(job.deadline is not None or job.priority for job in queued)
    while queue.jobs:
        queue.take(BatchLimits(size))
    assert (queue.size, queue.is_ordered, queue.earliest_deadline) == (0, False, NEVER)


@given(queues, workers, limits, st.booleans())
def test_nothing_is_sent_early_while_a_request_has_a_deadline_or_a_priority(
    queued, some, caps, early
):
    batches = assign(fill_queue(queued), some, NOW, caps, early).batches
    if any(job.deadline is not None or job.priority for job in queued):
        assert all(worker.batches == 0 for worker, _ in batches)
    assert len({id(worker) for worker, _ in batches}) == len(batches)


@given(queues, workers, limits)
def test_where_batches_are_long_only_a_worker_that_prepares_ahead_gets_one_early(
    queued, some, caps
):
    assert all(
        worker.batches == 0 or worker.prefetch
        for worker, _ in assign(fill_queue(queued), some, NOW, caps, allow_early=False).batches
    )


@given(st.lists(st.lists(urgent, min_size=1, max_size=5), max_size=4), queues, workers)
def test_suspects_go_first_to_idle_workers_and_among_themselves(groups, queued, idle):
    queue = fill_queue(queued)
    queue.suspect(Suspects(group, 1) for group in groups)
    for job in (job for group in groups for job in group if job.gone):
        queue.leave(job)
    result = assign(queue, idle, NOW, BatchLimits(4))
    suspects = [job for group in queue.suspects for job in group.jobs]
    sent = [job for _, group in result.retries for job in group.jobs] + [
        job for _, batch in result.batches for job in batch
    ]
    assert sorted_ids([*sent, *result.skipped, *queue.jobs, *suspects]) == sorted_ids(
        [*queued, *(job for group in groups for job in group)]
    )
    assert not any(is_over(job) for job in [*sent, *suspects])
    assert all(worker.batches == 0 for worker, _ in result.retries)
    assert all(
        any(set(map(id, group.jobs)) <= set(map(id, origin)) for origin in groups)
        for _, group in result.retries
    )
    used = [worker for worker, _ in (*result.retries, *result.batches)]
    assert len(set(map(id, used))) == len(used)
    if queue.suspects:
        assert all(worker.batches or any(worker is user for user in used) for worker in idle)


@given(st.integers(1, 70), st.data())
def test_one_request_that_kills_workers_ends_three_at_most_and_is_found(count, data):
    everyone = [FakeJob() for _ in range(count)]
    guilty = data.draw(st.sampled_from(everyone))
    todo, answered, deaths = [Suspects(everyone, 0)], [], 0
    while todo:
        group = todo.pop()
        if guilty in group.jobs:
            deaths += 1
            todo += halves(group)
        else:
            answered += group.jobs
    assert deaths <= 3
    assert sorted_ids(answered) == sorted_ids(job for job in everyone if job is not guilty)


@dataclass
class Worker:
    """A worker that takes some time for a batch, on the test's clock."""

    prefetch: bool
    free_at: deque[float] = field(default_factory=deque)
    has_suspects: bool = False

    @property
    def batches(self) -> int:
        return len(self.free_at)


@given(
    st.lists(st.tuples(st.floats(0, 0.5), urgent), max_size=40),
    st.lists(st.booleans(), min_size=1, max_size=3),
    st.floats(0.01, 2),
    st.builds(
        BatchLimits,
        max_items=st.integers(1, 4),
        max_bytes=st.integers(10, 60),
        wait=st.none() | st.floats(0, 1),
    ),
)
def test_each_request_ends_once_and_in_time_whatever_arrives(arrivals, kinds, seconds, caps):
    """Each event is an arrival, a reply, or the time that `assign` asked to be woken at."""
    queue, pool = RequestQueue(), [Worker(prefetch) for prefetch in kinds]
    now, wake, ended, todo = NOW, NEVER, [], []
    for gap, job in arrivals:
        job.arrived = (todo[-1].arrived if todo else NOW) + gap
        job.deadline = (
            None if job.deadline is None else job.arrived + abs(job.deadline - NOW) + 0.001
        )
        todo.append(job)
    todo = deque(todo)
    while todo or queue.jobs or any(worker.free_at for worker in pool):
        events = (
            [worker.free_at[0] for worker in pool if worker.free_at]
            + [wake]
            + ([todo[0].arrived] if todo else [])
        )
        now = min(events)
        assert not math.isinf(now), "requests wait, and nothing will ever happen"
        while todo and todo[0].arrived <= now:
            job = todo.popleft()
            queue.put(job, len(job.body))
        for worker in pool:
            if worker.free_at and worker.free_at[0] <= now:
                worker.free_at.popleft()
        result = assign(queue, pool, now, caps)
        wake = result.wake_at
        for worker, batch in result.batches:
            worker.free_at.append(max(now, worker.free_at[-1] if worker.free_at else now) + seconds)
            assert not any(job.deadline is not None and job.deadline < now for job in batch)
            ended += batch
        ended += result.skipped
        assert all(job.deadline is None or job.deadline > now for job in queue.jobs)
        assert not (caps.wait is None and queue.jobs and not all(worker.batches for worker in pool))
    assert sorted_ids(ended) == sorted_ids(job for _, job in arrivals)
