"""The dispatcher of a version with a latency target; the test plays the workers."""

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
from tsx_runtime.core.telemetry.batch_times import NO_TIMES
from tsx_runtime.errors import AnswerLate, QueueFull, WorkerDied
from tsx_runtime.features.slo.dispatcher import SloDispatcher

pytestmark = pytest.mark.anyio

LONG_TARGET = latency_target("p99<60s")
BENCHMARK = [(1, 1.0), (8, 2.0), (64, 4.0)]  # seconds of a benchmark


async def start_dispatcher(
    target=LONG_TARGET, points=BENCHMARK, workers=1, queue=None
) -> tuple[SloDispatcher, list[Peer]]:
    dispatcher = SloDispatcher(
        'Model "m" [Version 1.0]', BatchLimits(1024), Bounds(), target, points, queue
    )
    dispatcher.accept(True)
    return dispatcher, [(await add_worker(dispatcher))[1] for _ in range(workers)]


async def batch_sizes(dispatcher, peer, count: int, body: bytes = b"x") -> list[int]:
    """Submit `count` requests, answer each batch at once, and return the batch sizes."""
    jobs, batches = submit(dispatcher, *[body] * count), []
    all_done = asyncio.gather(*(job.done for job in jobs), return_exceptions=True)
    await asyncio.sleep(0)
    while not all_done.done():
        frame = await peer.read()
        batches.append(len(frame.items))
        await peer.reply(frame)
        await asyncio.wait([all_done], timeout=0.05)
    return batches


@pytest.mark.parametrize(
    ("target", "min_size", "max_size"), [("p99<60s", 30, 30), ("p99<2s", 4, 8)]
)
async def test_a_batch_is_as_large_as_the_latency_target_allows(target, min_size, max_size):
    dispatcher, (peer,) = await start_dispatcher(latency_target(target))
    assert min_size <= (await batch_sizes(dispatcher, peer, 30))[0] <= max_size


async def test_a_request_that_would_miss_the_target_is_refused_on_arrival():
    dispatcher, (peer,) = await start_dispatcher(latency_target("p99<5s"))
    jobs, frame = await send(dispatcher, peer, *[b"x"] * 64)
    error = await refusal_of(submit(dispatcher, b"x")[0], QueueFull)
    assert error.status == 503
    assert 1 <= error.retry_after <= 5
    assert "slo: p99<5s" in error.message
    assert dispatcher.attainment.refused == 1
    await peer.reply(frame)
    assert [await answer(job) for job in jobs] == [b"x"] * 64
    counts = dispatcher.attainment
    assert (counts.attained, counts.missed, counts.refused, counts.recent()) == (64, 0, 1, 1.0)


async def test_an_idle_worker_always_accepts_a_request():
    dispatcher, (peer,) = await start_dispatcher(latency_target("p99<1ms"))
    for _ in range(2):
        (job,) = submit(dispatcher, b"x")
        frame = await peer.read()
        await refusal_of(submit(dispatcher, b"y")[0], QueueFull)
        time.sleep(0.002)  # noqa: ASYNC251  # the target passes
        await peer.reply(frame)
        assert await answer(job) == b"x"
    assert (dispatcher.attainment.attained, dispatcher.attainment.missed) == (0, 2)
    assert dispatcher.attainment.budget_left(0.99) < 0


async def test_without_a_benchmark_batches_start_at_one_and_grow():
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


async def test_during_a_start_one_request_waits_and_others_get_retry_after():
    dispatcher, _ = await start_dispatcher(workers=0)
    dispatcher.seconds_until_ready = lambda: 7.0
    first, second = submit(dispatcher, b"x", b"y")
    assert (await refusal_of(second, QueueFull)).retry_after == 7
    _, peer = await add_worker(dispatcher)
    await peer.serve()
    assert await answer(first) == b"x"


async def test_a_greater_priority_displaces_a_waiting_request():
    dispatcher, (peer,) = await start_dispatcher(latency_target("p99<20s"), [(1, 4.0)])
    submit(dispatcher, b"x")
    await peer.read()
    waiting_jobs = []
    while not waiting_jobs or not waiting_jobs[-1].done.done():
        waiting_jobs += submit(dispatcher, b"y")
    await refusal_of(waiting_jobs.pop(), QueueFull)
    urgent_job = a_waiting_job(b"urgent", priority=1)
    dispatcher.submit(urgent_job)
    assert [job for job in waiting_jobs if job.done.done()] == waiting_jobs[-1:]
    await refusal_of(waiting_jobs[-1], QueueFull)
    assert not urgent_job.done.done()
    assert (dispatcher.attainment.refused, dispatcher.attainment.missed) == (2, 0)


async def test_a_request_lost_with_its_worker_is_a_miss():
    dispatcher, (peer,) = await start_dispatcher()
    (job,) = submit(dispatcher, b"x")
    await peer.read()
    batch = await kill(dispatcher.channels[0], peer)
    dispatcher.retry_lost(batch._replace(deaths=3), (), WorkerDied("It died."))
    await refusal_of(job, WorkerDied)
    assert dispatcher.attainment.missed == 1


async def test_a_changed_target_applies_at_once():
    dispatcher, (peer,) = await start_dispatcher()
    dispatcher.change(BatchLimits(1024), Bounds(slo=latency_target("p99<2s")))
    assert 4 <= (await batch_sizes(dispatcher, peer, 30))[0] <= 8
    assert dispatcher.control.target.text == "p99<2s"


async def test_a_request_for_an_unloaded_model_waits_for_its_load():
    dispatcher = SloDispatcher('Model "m" [Version 1.0]', BatchLimits(1024), Bounds(), LONG_TARGET)
    dispatcher.wake = lambda: dispatcher.accept(True) is None
    first, second = submit(dispatcher, b"x", b"y")
    assert dispatcher.pending == 1
    await refusal_of(second, QueueFull)
    _, peer = await add_worker(dispatcher)
    await peer.serve()
    assert await answer(first) == b"x"


async def test_the_cost_of_late_requests_counts():
    queue = CostQueue(1.0)
    dispatcher, (peer,) = await start_dispatcher(queue=queue)
    late_job = a_waiting_job(b"x" * 100, time.monotonic() + 0.02)
    dispatcher.submit(late_job)
    frame = await peer.read()
    await refusal_of(late_job, AnswerLate)
    assert (await peer.read()).kind is wire.Kind.CANCEL
    await peer.reply(frame, NO_TIMES + json.dumps(cost_metrics(50.0)).encode())
    await dispatcher.wait_idle()
    assert dispatcher.control.weights._unit == 100
    assert queue.cost(late_job) == 50


async def test_a_batch_has_few_large_requests_or_many_small_ones():
    dispatcher, (peer,) = await start_dispatcher(latency_target("p99<20s"), ())
    # A batch takes a second for each 100 bytes.
    for number in range(600):
        count, cost = number % 8 + 1, 100 * (number % 7 + 1)
        dispatcher.control.learn(count, cost / 100, number * 10.0, 1, 0, cost)
    assert dispatcher.control.weighs
    large_batch_size, small_batch_size = [
        (await batch_sizes(dispatcher, peer, 8, b"x" * size))[0] for size in (1000, 50)
    ]
    assert large_batch_size < small_batch_size == 8
