"""Continuous batching: requests join a worker's running ones. Decisions and the dispatcher."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.jobs import NOW, TIMEOUT, FakeJob, a_waiting_job, answer_of, refusal_of
from tests.kit.peers import (
    add_worker,
    answer,
    bodies,
    counts,
    kill,
    serve,
    soon,
    submit,
    wait_idle,
)
from tests.runtime.core.scheduling.test_batching import (
    FakeWorker,
    fill_queue,
    is_over,
    queues,
    sorted_ids,
)
from tests.support.clients.talker import until
from tsx_runtime import wire
from tsx_runtime.core.scheduling.dispatcher import Bounds
from tsx_runtime.core.scheduling.joining import JoiningDispatcher, blame, join
from tsx_runtime.core.scheduling.queue import BatchLimits, Suspects, urgency
from tsx_runtime.errors import AnswerLate, DeadlinePassed, WorkerDied

pytestmark = pytest.mark.anyio

workers = st.lists(
    st.builds(FakeWorker, batches=st.integers(0, 4), has_suspects=st.just(False)), max_size=4
)
limits = st.builds(BatchLimits, max_items=st.integers(1, 4))


@given(queues, workers, limits)
def test_no_job_is_lost_or_doubled_and_jobs_are_served_in_order(
    queued_jobs, some_workers, batch_limits
):
    queue = fill_queue(queued_jobs)
    result = join(queue, some_workers, NOW, batch_limits)
    sent_jobs = [job for _, jobs in result.batches for job in jobs]
    assert sorted_ids([*sent_jobs, *result.skipped, *queue.jobs]) == sorted_ids(queued_jobs)
    assert sorted_ids(result.skipped) == sorted_ids(filter(is_over, queued_jobs))
    valid_jobs = sorted((job for job in queued_jobs if not is_over(job)), key=urgency)
    assert sorted_ids(sent_jobs) == sorted_ids(valid_jobs[: len(sent_jobs)])


@given(queues, workers, limits)
def test_workers_are_filled_up_to_their_limit(queued_jobs, some_workers, batch_limits):
    queue = fill_queue(queued_jobs)
    for worker, jobs in join(queue, some_workers, NOW, batch_limits).batches:
        worker.batches += len(jobs)
        assert worker.batches <= batch_limits.max_items
    assert not queue.jobs or all(
        worker.batches >= batch_limits.max_items for worker in some_workers
    )


def test_requests_go_to_the_least_busy_workers():
    busy_worker, idle_worker = FakeWorker(2), FakeWorker(0)
    jobs = [FakeJob() for _ in range(4)]
    assert sorted(
        len(joined_jobs)
        for _, joined_jobs in join(
            fill_queue(jobs), [busy_worker, idle_worker], NOW, BatchLimits(8)
        ).batches
    ) == [1, 3]


def test_no_request_joins_a_worker_with_suspects():
    suspects, third = [FakeJob(), FakeJob()], FakeJob()
    queue = fill_queue([third])
    queue.suspect([Suspects(suspects, 1)])
    free_worker, busy_worker = FakeWorker(1), FakeWorker(2)
    result = join(queue, [free_worker, busy_worker], NOW, BatchLimits(4))
    assert result.retries == [(free_worker, Suspects(suspects, 1))]
    assert result.batches == [(busy_worker, [third])]
    assert not join(
        fill_queue([FakeJob()]), [FakeWorker(1, has_suspects=True)], NOW, BatchLimits(4)
    ).batches


def test_the_least_busy_worker_is_kept_free_for_waiting_suspects():
    queue = fill_queue([FakeJob(), FakeJob()])
    group = Suspects([FakeJob(), FakeJob()], 1)
    queue.suspect([group])
    first_worker, second_worker = FakeWorker(2), FakeWorker(2)
    assert [
        worker
        for worker, _ in join(queue, [first_worker, second_worker], NOW, BatchLimits(3)).batches
    ] == [second_worker]
    assert not join(queue, [first_worker], NOW, BatchLimits(3)).batches
    first_worker.batches = 1
    assert join(queue, [first_worker], NOW, BatchLimits(3)).retries == [(first_worker, group)]


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 3))
def test_requests_of_a_dead_worker_are_retried_in_smaller_groups(
    lost_count: int, blamed_count: int, begun_count: int
):
    """Check the groups for a retry; requests in no group are refused."""
    jobs = [FakeJob() for _ in range(lost_count)]
    groups = blame(jobs, jobs[:blamed_count], lost_count + begun_count)
    retried_jobs = [job for group in groups for job in group.jobs]
    assert len(sorted_ids(retried_jobs)) == len(set(sorted_ids(retried_jobs)))
    assert all(group.deaths > 0 for group in groups)
    if blamed_count and lost_count:
        assert sorted_ids(retried_jobs) == sorted_ids(
            jobs[:blamed_count] if min(blamed_count, lost_count) > 1 else []
        )
        assert all(len(group.jobs) == 1 for group in groups)
    elif lost_count == 1 and not begun_count:
        assert not groups
    else:
        assert sorted_ids(retried_jobs) == sorted_ids(jobs)
        assert all(len(group.jobs) <= (lost_count + 1) // 2 or lost_count == 1 for group in groups)


DIED = WorkerDied("Worker died.")


async def start_dispatcher():
    return await serve(JoiningDispatcher('Model "m" [Version 1.0]', BatchLimits(8), Bounds()))


async def test_requests_of_a_stuck_worker_are_refused_if_no_worker_remains():
    dispatcher, channel, peer = await start_dispatcher()
    jobs = submit(dispatcher, b"a", b"b")
    await peer.read()
    dispatcher.accept(False)
    dispatcher.requeue(await kill(channel, peer), channel.streaming, DIED)
    for job in jobs:
        await refusal_of(job, WorkerDied)
    await wait_idle(dispatcher)
    assert not channel.batches


async def test_a_requeued_request_is_not_blamed_for_a_later_death():
    dispatcher, channel, peer = await start_dispatcher()
    a, b = submit(dispatcher, b"a", b"b")
    await peer.read()
    dispatcher.retry_lost(await kill(channel, peer), set(), DIED)
    channel, peer = await add_worker(dispatcher)
    assert bodies(await peer.read()) == [b"a"]
    dispatcher.requeue(await kill(channel, peer), set(), DIED)
    channel, peer = await add_worker(dispatcher)
    await peer.serve()
    assert await answer(b) == b"b"
    [c] = submit(dispatcher, b"c")
    assert sorted([bodies(await peer.read()) for _ in range(2)]) == [[b"a"], [b"c"]]
    dispatcher.retry_lost(await kill(channel, peer), set(), DIED)
    channel, peer = await add_worker(dispatcher)
    for _ in range(2):
        await peer.serve()
    assert [await answer(a), await answer(c)] == [b"a", b"c"]


async def test_a_lowered_response_timeout_applies_to_running_requests():
    dispatcher, _, peer = await start_dispatcher()
    [late_job] = submit(dispatcher, b"late")
    await peer.read()
    dispatcher.response_timeout = 0.2
    dispatcher.change(dispatcher.limits, dispatcher.bounds)
    end = time.monotonic() + TIMEOUT
    while not late_job.done.done():
        assert time.monotonic() < end
        [quick_job] = submit(dispatcher, b"other")
        while (frame := await peer.read()).kind is not wire.Kind.BATCH:
            pass
        await peer.reply(frame)
        await asyncio.wait([quick_job.done], timeout=TIMEOUT)
    await refusal_of(late_job, WorkerDied, "responseTimeout")


async def test_the_response_timeout_pauses_while_a_slow_client_blocks_a_worker():
    dispatcher, channel, peer = await start_dispatcher()
    slow_job, _ = submit(dispatcher, b"slow", b"other")
    first = await peer.read()
    for size in (1, 5 << 20):
        await peer.stream(first, b"x" * size)
    parts = (await answer_of(slow_job)).parts()
    assert await anext(parts) == b"x"
    await until(lambda: channel.is_paused)
    for flight in channel.flights.values():
        flight.last_activity -= 1000
    assert len(await anext(parts)) == 5 << 20
    assert not channel.is_paused
    assert not channel.pop_overdue(time.monotonic() - 500)


@pytest.mark.parametrize("worker_dies", [False, True])
async def test_a_late_request_keeps_its_slot_until_the_worker_ends_it(worker_dies):
    dispatcher, channel, peer = await start_dispatcher()
    late_job, patient_job = submit(dispatcher, a_waiting_job(b"late", soon()), b"other")
    frames = [await peer.read(), await peer.read()]
    await refusal_of(late_job, DeadlinePassed, "did not answer")
    cancelled = await peer.read()
    index = [bodies(frame) for frame in frames].index([b"late"])
    assert (cancelled.kind, cancelled.batch) == (wire.Kind.CANCEL, frames[index].batch)
    assert channel.batches == 2
    if worker_dies:
        dispatcher.retry_lost(await kill(channel, peer), channel.streaming, DIED)
        channel, peer = await add_worker(dispatcher)
        await peer.serve()
    else:
        await peer.reply(frames[index])
        await until(lambda: channel.batches == 1)
        await peer.reply(frames[1 - index])
    assert await answer(patient_job) == b"other"
    await wait_idle(dispatcher)
    assert counts(dispatcher) == (2, {200: 1}, {"AnswerLate": 1})
    assert (channel.batches, dispatcher._deadlines, dispatcher._deaths) == (0, {}, {})


async def test_a_started_request_of_a_lost_worker_is_refused_as_late():
    dispatcher, channel, peer = await start_dispatcher()
    [late_job] = submit(dispatcher, a_waiting_job(b"late", soon()))
    await peer.read()
    dispatcher.requeue(await kill(channel, peer), set(), DIED)
    await refusal_of(late_job, AnswerLate)
    assert not dispatcher._restarted
    await wait_idle(dispatcher)
