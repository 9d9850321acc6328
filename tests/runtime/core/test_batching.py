"""`assign` as properties: jobs are plain data, the clock is a number."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.batching import Limits, Suspects, assign, halves
from tsx_runtime.errors import TsxError
from tsx_runtime.wire import Buffer

NOW = 100.0


@dataclass(eq=False)
class FakeJob:
    meta: bytes = b""
    body: Buffer = b"x"
    arrived: float = NOW
    deadline: float | None = None
    gone: bool = False

    def answer(self, status: int, headers: Buffer, body: Buffer) -> None: ...

    def refuse(self, error: TsxError) -> None: ...

    def piece(self, headers: Buffer, body: Buffer) -> None: ...


@dataclass(eq=False)
class FakeWorker:
    batches: int = 0
    got: list[FakeJob] = field(default_factory=list)


jobs = st.builds(
    FakeJob,
    body=st.binary(max_size=20),
    arrived=st.floats(NOW - 10, NOW),
    deadline=st.none() | st.floats(NOW - 1, NOW + 1),
    gone=st.booleans(),
)
queues = st.lists(jobs, max_size=40)
workers = st.lists(st.builds(FakeWorker, batches=st.integers(0, 2)), max_size=5)
limits = st.builds(Limits, max_items=st.integers(1, 8), max_bytes=st.integers(1, 60), wait=st.none() | st.floats(0, 10))


def is_over(job: FakeJob) -> bool:
    return job.gone or (job.deadline is not None and job.deadline <= NOW)


@given(queues, workers, limits)
def test_every_job_is_in_exactly_one_place_afterwards_and_in_its_old_order(queued, idle, caps):
    queue = deque(queued)
    result = assign(queue, idle, NOW, caps)
    sent = [job for _, batch in result.batches for job in batch]
    assert sorted(map(id, [*sent, *result.skipped, *queue])) == sorted(map(id, queued))
    kept = [job for job in queued if job not in result.skipped]
    assert [*sent, *queue] == kept


@given(queues, workers, limits)
def test_caps_hold_and_only_one_request_alone_may_exceed_the_cap_on_bytes(queued, idle, caps):
    for _, batch in assign(deque(queued), idle, NOW, caps).batches:
        assert 1 <= len(batch) <= caps.max_items
        assert len(batch) == 1 or sum(len(job.body) for job in batch) <= caps.max_bytes


@given(queues, workers, limits)
def test_who_is_gone_or_too_late_is_skipped_and_nobody_else(queued, idle, caps):
    result = assign(deque(queued), idle, NOW, caps)
    assert all(is_over(job) for job in result.skipped)
    assert not any(is_over(job) for _, batch in result.batches for job in batch)


@given(queues, workers, st.integers(1, 8))
def test_no_request_waits_while_a_worker_is_idle(queued, idle, size):
    queue = deque(queued)
    result = assign(queue, idle, NOW, Limits(size))
    busy = {id(worker) for worker, _ in result.batches}
    left_idle = [worker for worker in idle if worker.batches == 0 and id(worker) not in busy]
    assert not (left_idle and queue)
    assert result.wake is None


@given(queues, st.lists(st.builds(FakeWorker, batches=st.integers(1, 3)), min_size=2, max_size=5), limits)
def test_with_several_workers_a_busy_one_gets_nothing_early(queued, busy, caps):
    assert not assign(deque(queued), busy, NOW, caps).batches


@given(queues, limits)
def test_a_single_busy_worker_gets_one_more_batch_only_when_it_is_full(queued, caps):
    result = assign(deque(queued), [FakeWorker(batches=1)], NOW, caps)
    assert [len(batch) for _, batch in result.batches] in ([], [caps.max_items])
    assert not assign(deque(queued), [FakeWorker(batches=2)], NOW, caps).batches


@given(st.lists(st.floats(NOW - 10, NOW), min_size=1, max_size=20), st.integers(1, 8), st.floats(0, 10))
def test_a_model_that_waits_for_company_never_waits_longer_than_it_said(arrivals, size, wait):
    queue = deque(FakeJob(arrived=at) for at in sorted(arrivals))
    oldest = queue[0].arrived
    result = assign(queue, [FakeWorker()], NOW, Limits(size, wait=wait))
    if result.batches:
        assert len(arrivals) >= size or oldest + wait <= NOW
    else:
        assert result.wake == oldest + wait
        assert result.wake > NOW


@given(st.lists(st.lists(jobs, min_size=1, max_size=5), max_size=4), queues, workers)
def test_suspects_go_first_to_idle_workers_and_among_themselves(groups, queued, idle):
    suspects, queue = deque(Suspects(group, 1) for group in groups), deque(queued)
    result = assign(queue, idle, NOW, Limits(4), suspects)
    left = [job for group in suspects for job in group.jobs]
    sent = [job for _, group in result.retries for job in group.jobs] + [job for _, batch in result.batches for job in batch]
    assert sorted(map(id, [*sent, *result.skipped, *queue, *left])) == sorted(
        map(id, [*queued, *(job for group in groups for job in group)])
    )
    assert all(worker.batches == 0 for worker, _ in result.retries)
    assert all(any(set(map(id, group.jobs)) <= set(map(id, origin)) for origin in groups) for _, group in result.retries)
    used = [worker for worker, _ in (*result.retries, *result.batches)]
    assert len(set(map(id, used))) == len(used)
    if suspects:
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
    assert sorted(map(id, answered)) == sorted(id(job) for job in everyone if job is not guilty)


def test_idle_worker_takes_what_is_there():
    first, second = FakeJob(), FakeJob()
    worker = FakeWorker()
    assert assign(deque([first, second]), [worker], NOW, Limits(8)).batches == [(worker, [first, second])]


def test_two_idle_workers_share_in_order_of_arrival():
    queue = deque(FakeJob() for _ in range(5))
    expected = list(queue)
    one, two = FakeWorker(), FakeWorker()
    result = assign(queue, [one, two], NOW, Limits(4))
    assert result.batches == [(one, expected[:4]), (two, expected[4:])]
