"""`join` as properties: requests that come to a worker which works on others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.core.test_batching import NOW, FakeJob, FakeWorker, ids, is_over, queues, waiting
from tsx_runtime.core.joining import blame, join
from tsx_runtime.core.queue import Limits, Suspects, urgency

workers = st.lists(st.builds(FakeWorker, batches=st.integers(0, 4), suspected=st.just(False)), max_size=4)
limits = st.builds(Limits, max_items=st.integers(1, 4))


@given(queues, workers, limits)
def test_every_job_is_in_exactly_one_place_afterwards_and_served_in_order(queued, some, caps):
    queue = waiting(queued)
    result = join(queue, some, NOW, caps)
    sent = [job for _, jobs in result.batches for job in jobs]
    assert ids([*sent, *result.skipped, *queue.jobs]) == ids(queued)
    assert ids(result.skipped) == ids(filter(is_over, queued))
    left = sorted((job for job in queued if not is_over(job)), key=urgency)
    assert ids(sent) == ids(left[: len(sent)])


@given(queues, workers, limits)
def test_no_request_waits_while_a_worker_has_room_and_none_gets_more_than_fits(queued, some, caps):
    queue = waiting(queued)
    for worker, jobs in join(queue, some, NOW, caps).batches:
        worker.batches += len(jobs)
        assert worker.batches <= caps.max_items
    assert not queue.jobs or all(worker.batches >= caps.max_items for worker in some)


def test_requests_spread_over_the_workers_with_the_fewest_under_way():
    busy, idle = FakeWorker(2), FakeWorker(0)
    jobs = [FakeJob() for _ in range(4)]
    assert sorted(len(taken) for _, taken in join(waiting(jobs), [busy, idle], NOW, Limits(8)).batches) == [1, 3]


def test_nobody_joins_suspects_while_they_are_in_quarantine():
    suspects, other = [FakeJob(), FakeJob()], FakeJob()
    queue = waiting([other])
    queue.suspect([Suspects(suspects, 1)])
    free, busy = FakeWorker(1), FakeWorker(2)
    result = join(queue, [free, busy], NOW, Limits(4))
    assert result.retries == [(free, Suspects(suspects, 1))]
    assert result.batches == [(busy, [other])]
    assert not join(waiting([FakeJob()]), [FakeWorker(1, suspected=True)], NOW, Limits(4)).batches


def test_while_suspects_wait_for_room_the_least_busy_worker_makes_some():
    queue = waiting([FakeJob(), FakeJob()])
    group = Suspects([FakeJob(), FakeJob()], 1)
    queue.suspect([group])
    least, most = FakeWorker(2), FakeWorker(2)
    assert [worker for worker, _ in join(queue, [least, most], NOW, Limits(3)).batches] == [most]
    assert not join(queue, [least], NOW, Limits(3)).batches
    least.batches = 1
    assert join(queue, [least], NOW, Limits(3)).retries == [(least, group)]


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 3))
def test_the_guilty_are_found_and_the_others_tried_again(left: int, blamed: int, begun: int):
    """Whoever is not in a group, or innocent, is refused."""
    jobs = [FakeJob() for _ in range(left)]
    groups = blame(jobs, jobs[:blamed], left + begun)
    again = [job for group in groups for job in group.jobs]
    assert len(ids(again)) == len(set(ids(again)))
    assert all(group.deaths > 0 for group in groups)
    if blamed and left:
        assert ids(again) == ids(jobs[:blamed] if min(blamed, left) > 1 else [])
        assert all(len(group.jobs) == 1 for group in groups)
    elif left == 1 and not begun:
        assert not groups
    else:
        assert ids(again) == ids(jobs)
        assert all(len(group.jobs) <= (left + 1) // 2 or left == 1 for group in groups)
