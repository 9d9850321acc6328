"""The dispatcher of a version with a latency target, against workers that the test moves."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.kit.jobs import a_waiting_job, refusal_of
from tests.kit.peers import Peer, add_worker, answer, kill, send, submit
from tests.runtime.core.scheduling.test_costs import cost_metrics
from tsx_archiver.metadata.slo import latency_target
from tsx_runtime import wire
from tsx_runtime.core.scheduling.costs import CostQueue
from tsx_runtime.core.scheduling.dispatcher import Bounds
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.core.slo.dispatcher import SloDispatcher
from tsx_runtime.core.telemetry.batch_times import NO_TIMES
from tsx_runtime.errors import AnswerLate, QueueFull, WorkerDied

pytestmark = pytest.mark.anyio

PATIENT = latency_target("p99<60s")
KNOWN = [(1, 1.0), (8, 2.0), (64, 4.0)]  # seconds of a benchmark


async def start_dispatcher(
    target=PATIENT, points=KNOWN, workers=1, queue=None
) -> tuple[SloDispatcher, list[Peer]]:
    dispatcher = SloDispatcher(
        'Model "m" [Version 1.0]', BatchLimits(1024), Bounds(), target, points, queue
    )
    dispatcher.accept(True)
    return dispatcher, [(await add_worker(dispatcher))[1] for _ in range(workers)]


async def batch_sizes(dispatcher, peer, count: int, body: bytes = b"x") -> list[int]:
    """Submit so many requests, answer each batch at once, and return the sizes of the batches."""
    jobs, batches = submit(dispatcher, *[body] * count), []
    done = asyncio.gather(*(job.done for job in jobs), return_exceptions=True)
    await asyncio.sleep(0)
    while not done.done():
        frame = await peer.read()
        batches.append(len(frame.items))
        await peer.reply(frame)
        await asyncio.wait([done], timeout=0.05)
    return batches


@pytest.mark.parametrize(("target", "least", "most"), [("p99<60s", 30, 30), ("p99<2s", 4, 8)])
async def test_a_batch_is_as_large_as_the_target_allows(target, least, most):
    dispatcher, (peer,) = await start_dispatcher(latency_target(target))
    assert least <= (await batch_sizes(dispatcher, peer, 30))[0] <= most


async def test_a_request_that_would_be_late_is_refused_on_arrival():
    dispatcher, (peer,) = await start_dispatcher(latency_target("p99<5s"))
    taken, frame = await send(dispatcher, peer, *[b"x"] * 64)
    error = await refusal_of(submit(dispatcher, b"x")[0], QueueFull)
    assert error.status == 503
    assert 1 <= error.retry_after <= 5
    assert "slo: p99<5s" in error.message
    assert dispatcher.report.refused == 1
    await peer.reply(frame)
    assert [await answer(job) for job in taken] == [b"x"] * 64
    assert dispatcher.report[3:7] == (64, 0, 1, 1.0)


async def test_an_idle_worker_takes_a_request_whatever_the_curve_says():
    dispatcher, (peer,) = await start_dispatcher(latency_target("p99<1ms"))
    for _ in range(2):
        (job,) = submit(dispatcher, b"x")
        frame = await peer.read()
        await refusal_of(submit(dispatcher, b"y")[0], QueueFull)
        time.sleep(0.002)  # noqa: ASYNC251  # the target passes
        await peer.reply(frame)
        assert await answer(job) == b"x"
    assert (dispatcher.report.attained, dispatcher.report.missed) == (0, 2)
    assert dispatcher.report.budget_left < 0


async def test_without_a_benchmark_batches_begin_at_one_and_grow():
    dispatcher, (peer,) = await start_dispatcher(points=())
    submit(dispatcher, *[b"x"] * 4)
    sizes = []
    while sum(sizes) < 100:
        frame = await peer.read()
        sizes.append(len(frame.items))
        submit(dispatcher, *[b"x"] * 20)
        await peer.reply(frame)
    assert sizes[0] == 1
    assert max(sizes) > 5


async def test_while_workers_start_one_request_waits_and_others_return_when_they_are_ready():
    dispatcher, _ = await start_dispatcher(workers=0)
    dispatcher.seconds_until_ready = lambda: 7.0
    first, second = submit(dispatcher, b"x", b"y")
    assert (await refusal_of(second, QueueFull)).retry_after == 7
    _, peer = await add_worker(dispatcher)
    await peer.serve()
    assert await answer(first) == b"x"


async def test_a_greater_priority_takes_the_place_of_a_request_that_waits():
    dispatcher, (peer,) = await start_dispatcher(latency_target("p99<20s"), [(1, 4.0)])
    submit(dispatcher, b"x")
    await peer.read()
    waiting = []
    while not waiting or not waiting[-1].done.done():
        waiting += submit(dispatcher, b"y")
    await refusal_of(waiting.pop(), QueueFull)
    urgent = a_waiting_job(b"urgent", priority=1)
    dispatcher.submit(urgent)
    assert [job for job in waiting if job.done.done()] == waiting[-1:]
    await refusal_of(waiting[-1], QueueFull)
    assert not urgent.done.done()
    assert (dispatcher.report.refused, dispatcher.report.missed) == (2, 0)


async def test_a_request_that_its_worker_takes_with_it_is_a_miss():
    dispatcher, (peer,) = await start_dispatcher()
    (job,) = submit(dispatcher, b"x")
    await peer.read()
    batch = await kill(dispatcher.channels[0], peer)
    dispatcher.retry_lost(batch._replace(deaths=3), (), WorkerDied("It died."))
    await refusal_of(job, WorkerDied)
    assert dispatcher.report.missed == 1


async def test_another_target_holds_from_now_on():
    dispatcher, (peer,) = await start_dispatcher()
    dispatcher.change(BatchLimits(1024), Bounds(slo=latency_target("p99<2s")))
    assert 4 <= (await batch_sizes(dispatcher, peer, 30))[0] <= 8
    assert dispatcher.report.target.text == "p99<2s"


async def test_the_request_that_wakes_an_unloaded_model_waits_for_it():
    dispatcher = SloDispatcher('Model "m" [Version 1.0]', BatchLimits(1024), Bounds(), PATIENT)
    dispatcher.wake = lambda: dispatcher.accept(True) is None
    first, second = submit(dispatcher, b"x", b"y")
    assert dispatcher.pending == 1
    await refusal_of(second, QueueFull)
    _, peer = await add_worker(dispatcher)
    await peer.serve()
    assert await answer(first) == b"x"


async def test_requests_that_were_refused_while_they_ran_count_with_their_cost():
    queue = CostQueue(1.0)
    dispatcher, (peer,) = await start_dispatcher(queue=queue)
    late = a_waiting_job(b"x" * 100, time.monotonic() + 0.02)
    dispatcher.submit(late)
    frame = await peer.read()
    await refusal_of(late, AnswerLate)
    assert (await peer.read()).kind is wire.Kind.CANCEL
    await peer.reply(frame, NO_TIMES + json.dumps(cost_metrics(50.0)).encode())
    await dispatcher.wait_idle()
    assert dispatcher.control.weights._unit == 100
    assert queue.cost(late) == 50


async def test_a_batch_has_few_large_requests_or_many_small_ones():
    dispatcher, (peer,) = await start_dispatcher(latency_target("p99<20s"), ())
    # A batch takes a second for each 100 bytes.
    for number in range(600):
        count, cost = number % 8 + 1, 100 * (number % 7 + 1)
        dispatcher.control.learn(count, cost / 100, number * 10.0, 1, 0, cost)
    assert dispatcher.control.weighs
    large, small = [(await batch_sizes(dispatcher, peer, 8, b"x" * size))[0] for size in (1000, 50)]
    assert large < small == 8
