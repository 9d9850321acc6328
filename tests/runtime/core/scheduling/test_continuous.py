"""Requests that join a worker's running requests: decisions as properties, and the dispatcher."""

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
from tsx_runtime.core.scheduling.continuous import JoiningDispatcher, blame, join
from tsx_runtime.core.scheduling.dispatcher import Bounds
from tsx_runtime.core.scheduling.queue import BatchLimits, Suspects, urgency
from tsx_runtime.errors import AnswerLate, DeadlinePassed, WorkerDied

pytestmark = pytest.mark.anyio

workers = st.lists(
    st.builds(FakeWorker, batches=st.integers(0, 4), has_suspects=st.just(False)), max_size=4
)
limits = st.builds(BatchLimits, max_items=st.integers(1, 4))


@given(queues, workers, limits)
def test_every_job_is_in_exactly_one_place_afterwards_and_served_in_order(queued, some, caps):
    queue = fill_queue(queued)
    result = join(queue, some, NOW, caps)
    sent = [job for _, jobs in result.batches for job in jobs]
    assert sorted_ids([*sent, *result.skipped, *queue.jobs]) == sorted_ids(queued)
    assert sorted_ids(result.skipped) == sorted_ids(filter(is_over, queued))
    alive = sorted((job for job in queued if not is_over(job)), key=urgency)
    assert sorted_ids(sent) == sorted_ids(alive[: len(sent)])


@given(queues, workers, limits)
def test_no_request_waits_while_a_worker_has_room_and_none_gets_more_than_fits(queued, some, caps):
    queue = fill_queue(queued)
    for worker, jobs in join(queue, some, NOW, caps).batches:
        worker.batches += len(jobs)
        assert worker.batches <= caps.max_items
    assert not queue.jobs or all(worker.batches >= caps.max_items for worker in some)


def test_requests_spread_over_the_workers_with_the_fewest_under_way():
    busy, idle = FakeWorker(2), FakeWorker(0)
    jobs = [FakeJob() for _ in range(4)]
    assert sorted(
        len(taken) for _, taken in join(fill_queue(jobs), [busy, idle], NOW, BatchLimits(8)).batches
    ) == [1, 3]


def test_nobody_joins_suspects_while_they_are_in_quarantine():
    suspects, third = [FakeJob(), FakeJob()], FakeJob()
    queue = fill_queue([third])
    queue.suspect([Suspects(suspects, 1)])
    free, busy = FakeWorker(1), FakeWorker(2)
    result = join(queue, [free, busy], NOW, BatchLimits(4))
    assert result.retries == [(free, Suspects(suspects, 1))]
    assert result.batches == [(busy, [third])]
    assert not join(
        fill_queue([FakeJob()]), [FakeWorker(1, has_suspects=True)], NOW, BatchLimits(4)
    ).batches


def test_while_suspects_wait_for_room_the_least_busy_worker_makes_some():
    queue = fill_queue([FakeJob(), FakeJob()])
    group = Suspects([FakeJob(), FakeJob()], 1)
    queue.suspect([group])
    least, most = FakeWorker(2), FakeWorker(2)
    assert [worker for worker, _ in join(queue, [least, most], NOW, BatchLimits(3)).batches] == [
        most
    ]
    assert not join(queue, [least], NOW, BatchLimits(3)).batches
    least.batches = 1
    assert join(queue, [least], NOW, BatchLimits(3)).retries == [(least, group)]


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 3))
def test_the_guilty_are_found_and_the_others_tried_again(lost: int, blamed: int, begun: int):
    """Requests that are in no group are refused."""
    jobs = [FakeJob() for _ in range(lost)]
    groups = blame(jobs, jobs[:blamed], lost + begun)
    again = [job for group in groups for job in group.jobs]
    assert len(sorted_ids(again)) == len(set(sorted_ids(again)))
    assert all(group.deaths > 0 for group in groups)
    if blamed and lost:
        assert sorted_ids(again) == sorted_ids(jobs[:blamed] if min(blamed, lost) > 1 else [])
        assert all(len(group.jobs) == 1 for group in groups)
    elif lost == 1 and not begun:
        assert not groups
    else:
        assert sorted_ids(again) == sorted_ids(jobs)
        assert all(len(group.jobs) <= (lost + 1) // 2 or lost == 1 for group in groups)


DIED = WorkerDied("Worker died.")


async def start_dispatcher():
    return await serve(JoiningDispatcher('Model "m" [Version 1.0]', BatchLimits(8), Bounds()))


async def test_requests_of_a_stuck_worker_are_refused_where_no_worker_will_serve():
    dispatcher, channel, peer = await start_dispatcher()
    jobs = submit(dispatcher, b"a", b"b")
    await peer.read()
    dispatcher.accept(False)
    dispatcher.requeue(await kill(channel, peer), channel.streaming, DIED)
    for job in jobs:
        await refusal_of(job, WorkerDied)
    await wait_idle(dispatcher)
    assert not channel.batches


async def test_a_request_taken_back_from_a_stuck_worker_is_not_blamed_for_a_later_death():
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


async def test_a_response_timeout_that_is_lowered_holds_for_what_is_under_way():
    dispatcher, _, peer = await start_dispatcher()
    [late] = submit(dispatcher, b"late")
    await peer.read()
    dispatcher.response_timeout = 0.2
    dispatcher.change(dispatcher.limits, dispatcher.bounds)
    end = time.monotonic() + TIMEOUT
    while not late.done.done():
        assert time.monotonic() < end
        [quick] = submit(dispatcher, b"other")
        while (frame := await peer.read()).kind is not wire.Kind.BATCH:
            pass
        await peer.reply(frame)
        await asyncio.wait([quick.done], timeout=TIMEOUT)
    await refusal_of(late, WorkerDied, "responseTimeout")


async def test_no_time_runs_while_a_slow_client_holds_a_worker():
    dispatcher, channel, peer = await start_dispatcher()
    slow, _ = submit(dispatcher, b"slow", b"other")
    first = await peer.read()
    for size in (1, 5 << 20):
        await peer.stream(first, b"x" * size)
    parts = (await answer_of(slow)).parts()
    assert await anext(parts) == b"x"
    await until(lambda: channel.is_paused)
    for flight in channel.flights.values():
        flight.last_activity -= 1000
    assert len(await anext(parts)) == 5 << 20
    assert not channel.is_paused
    assert not channel.pop_overdue(time.monotonic() - 500)


@pytest.mark.parametrize("dies", [False, True])
async def test_a_late_request_is_cancelled_but_holds_its_place_until_the_worker_is_done(
    dies,
):
    dispatcher, channel, peer = await start_dispatcher()
    late, patient = submit(dispatcher, a_waiting_job(b"late", soon()), b"other")
    frames = [await peer.read(), await peer.read()]
    await refusal_of(late, DeadlinePassed, "did not answer")
    cancelled = await peer.read()
    index = [bodies(frame) for frame in frames].index([b"late"])
    assert (cancelled.kind, cancelled.batch) == (wire.Kind.CANCEL, frames[index].batch)
    assert channel.batches == 2
    if dies:
        dispatcher.retry_lost(await kill(channel, peer), channel.streaming, DIED)
        channel, peer = await add_worker(dispatcher)
        await peer.serve()
    else:
        await peer.reply(frames[index])
        await until(lambda: channel.batches == 1)
        await peer.reply(frames[1 - index])
    assert await answer(patient) == b"other"
    await wait_idle(dispatcher)
    assert counts(dispatcher) == (2, {200: 1}, {"AnswerLate": 1})
    assert (channel.batches, dispatcher._deadlines, dispatcher._deaths) == (0, {}, {})


async def test_a_request_that_had_begun_at_a_lost_worker_is_refused_at_its_deadline_as_begun():
    dispatcher, channel, peer = await start_dispatcher()
    [late] = submit(dispatcher, a_waiting_job(b"late", soon()))
    await peer.read()
    dispatcher.requeue(await kill(channel, peer), set(), DIED)
    await refusal_of(late, AnswerLate)
    assert not dispatcher._restarted
    await wait_idle(dispatcher)
