"""The dispatcher and its channels; the test plays the workers."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time

import pytest

from tests.kit.jobs import TIMEOUT, a_waiting_job, answer_of, refusal_of
from tests.kit.peers import (
    add_worker,
    answer,
    bodies,
    connect,
    counts,
    kill,
    overflow,
    send,
    serve,
    soon,
    submit,
    wait_idle,
)
from tsx_runtime import wire
from tsx_runtime.core.scheduling.channel import MAX_PIECES_PER_TURN, MAX_REPORT_BYTES, Channel
from tsx_runtime.core.scheduling.dispatcher import Bounds, Dispatcher
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.core.scheduling.strategies import Strategy, make_dispatcher
from tsx_runtime.core.telemetry.batch_times import NO_TIMES, times_of
from tsx_runtime.errors import (
    AnswerLate,
    BadRequest,
    ClientLeft,
    DeadlinePassed,
    LoadFailed,
    NoWorker,
    PredictionFailed,
    QueueFull,
    Unavailable,
    WorkerDied,
)

pytestmark = pytest.mark.anyio

DIED = WorkerDied("Worker died.")


async def start_dispatcher(batch: int = 4, wait: float | None = None, **bounds: int):
    """Start a dispatcher with one worker, whose batches count as short."""
    dispatcher = Dispatcher(
        'Model "m" [Version 1.0]', BatchLimits(batch, wait=wait), Bounds(**bounds)
    )
    dispatcher.service_rate.has_short_batches = True
    return await serve(dispatcher)


async def start_busy_dispatcher(batch: int = 2, **bounds: int):
    """Start a dispatcher whose only worker never answers."""
    dispatcher, channel, peer = await start_dispatcher(batch, **bounds)
    for _ in range(2):
        submit(dispatcher, *[b"before"] * batch)
        await peer.read()
    return dispatcher, channel, peer


async def test_concurrent_requests_share_a_batch_and_get_their_own_answers():
    dispatcher, _, peer = await start_dispatcher()
    jobs, frame = await send(dispatcher, peer, b"a", b"b", b"c")
    assert bodies(frame) == [b"a", b"b", b"c"]
    await peer.reply(frame)
    assert [await answer(job) for job in jobs] == [b"a", b"b", b"c"]
    assert (await jobs[0].done).headers == b"x-n: 1\r\n"
    assert dispatcher.stats.batch_sizes == {3: 1}
    assert dispatcher.stats.answers == {200: 3}


@pytest.mark.parametrize("size", [300_000, 5_000_000])
async def test_bodies_larger_than_the_read_buffer_are_complete(size):
    dispatcher, _, peer = await start_dispatcher()
    bodies = [bytes([number]) * size for number in range(3)]
    jobs, frame = await send(dispatcher, peer, *bodies)
    await asyncio.gather(peer.reply(frame), *(answer(job) for job in jobs))
    assert [await answer(job) for job in jobs] == bodies


async def test_a_full_queue_refuses_requests_at_once():
    dispatcher, _, peer = await start_dispatcher(1, items=2)
    first = submit(dispatcher, b"1")
    await peer.read()
    # The only worker may hold one more full batch.
    earlier_jobs = submit(dispatcher, b"2")
    await peer.read()
    submit(dispatcher, b"3", b"4")
    await overflow(dispatcher, "2 requests wait")
    assert not first[0].done.done()
    assert not earlier_jobs[0].done.done()


async def test_a_burst_is_not_refused_if_workers_are_idle():
    dispatcher, _, peer = await start_dispatcher(items=4)
    jobs = submit(dispatcher, *[bytes([number]) for number in range(8)])
    for _ in range(2):
        await peer.serve()
    assert [await answer(job) for job in jobs] == [bytes([number]) for number in range(8)]


async def test_requests_wait_for_a_starting_worker_but_not_without_one():
    dispatcher = Dispatcher("Model", BatchLimits(4), Bounds(10))
    await refusal_of(submit(dispatcher, b"a")[0], NoWorker)
    dispatcher.accept(True)
    [waiting_job] = submit(dispatcher, b"b")
    channel, peer = await add_worker(dispatcher)
    await peer.serve()
    assert await answer(waiting_job) == b"b"
    [last] = submit(dispatcher, b"c")
    dispatcher.remove(channel)
    dispatcher.accept(False)
    await refusal_of(last, NoWorker)


async def test_unstarted_requests_of_a_dead_worker_keep_their_places():
    dispatcher, channel, peer = await start_dispatcher(2)
    jobs = submit(dispatcher, b"1", b"2")
    await peer.read()
    jobs += submit(dispatcher, b"3", b"4")
    await peer.read()
    jobs += submit(dispatcher, b"5")
    peer.close()
    await channel.closed
    dispatcher.refuse_all(channel.sent.popleft().jobs, WorkerDied("Worker died."))
    _, new_peer = await add_worker(dispatcher)
    frame = await new_peer.read()
    assert bodies(frame) == [b"3", b"4"]
    await new_peer.reply(frame)
    await new_peer.serve()
    assert [await answer(job) for job in jobs[2:]] == [b"3", b"4", b"5"]
    for job in jobs[:2]:
        await refusal_of(job, WorkerDied)
    await wait_idle(dispatcher)


async def test_unstarted_requests_are_refused_if_the_last_worker_dies():
    dispatcher, channel, peer = await start_dispatcher(1)
    jobs = submit(dispatcher, b"1")
    await peer.read()
    jobs += submit(dispatcher, b"2")
    await peer.read()
    dispatcher.remove(channel)
    dispatcher.accept(False)
    peer.close()
    await refusal_of(jobs[1], NoWorker)
    dispatcher.refuse_all(channel.sent.popleft().jobs, WorkerDied("Worker died."))
    await wait_idle(dispatcher)


async def test_after_a_worker_death_requests_are_retried_in_halves_then_singly():
    dispatcher = Dispatcher("Model", BatchLimits(8), Bounds(100))
    dispatcher.accept(True)
    jobs = submit(dispatcher, *[bytes([number]) for number in range(8)])
    sizes = []
    while not all(job.done.done() for job in jobs):
        channel, peer = await add_worker(dispatcher)
        while not channel.closed.done() and not all(job.done.done() for job in jobs):
            frame = await peer.read()
            sizes.append(len(frame.items))
            if any(body == b"\x05" for _, _, body in frame.items):
                dispatcher.retry_lost(await kill(channel, peer), channel.streaming, DIED)
            else:
                await peer.reply(frame)
                await answer_of(jobs[frame.items[0][2][0]])
    assert sizes == [8, 4, 4, 1, 1, 1, 1]
    assert [job.done.exception() is None for job in jobs] == [number != 5 for number in range(8)]
    await wait_idle(dispatcher)


async def test_a_request_that_has_begun_to_stream_is_not_retried():
    dispatcher, channel, peer = await start_dispatcher(2)
    [streaming, second], frame = await send(dispatcher, peer, b"1", b"2")
    await peer.stream(frame, b"one ")
    parts = (await answer_of(streaming)).parts()
    dispatcher.retry_lost(await kill(channel, peer), channel.streaming, DIED)
    assert await anext(parts) == b"one "
    with pytest.raises(WorkerDied):
        await anext(parts)
    _, new_peer = await add_worker(dispatcher)
    frame = await new_peer.read()
    assert bodies(frame) == [b"2"]
    await new_peer.reply(frame)
    assert await answer(second) == b"2"


async def test_requests_without_client_or_past_their_deadline_do_not_run():
    dispatcher, _, peer = await start_dispatcher()
    [gone_job, late_job, valid_job] = submit(
        dispatcher, b"gone", a_waiting_job(b"late", deadline=time.monotonic() - 1), b"fine"
    )
    dispatcher.leave(gone_job)
    frame = await peer.read()
    assert bodies(frame) == [b"fine"]
    for job in (gone_job, late_job):
        await refusal_of(job, Unavailable)
    await peer.reply(frame)
    assert await answer(valid_job) == b"fine"


async def test_a_streamed_answer_arrives_in_pieces_and_ends_with_the_reply():
    dispatcher, _, peer = await start_dispatcher()
    [job], frame = await send(dispatcher, peer, b"x")
    await peer.stream(frame, b"one ", b"a: b\r\n")
    first = await answer_of(job)
    assert first.is_streamed
    assert first.headers == b"a: b\r\n"
    await peer.stream(frame, b"two ")
    await peer.answer(frame, (200, b"", b"three"))
    assert [part async for part in first.parts()] == [b"one ", b"two ", b"three"]


async def test_pieces_without_a_client_are_dropped():
    dispatcher, _, peer = await start_dispatcher()
    [job], frame = await send(dispatcher, peer, b"x")
    await peer.stream(frame, b"one ")
    first = await answer_of(job)
    job.gone = True
    await peer.stream(frame, b"two ")
    await peer.answer(frame, (200, b"", b"three"))
    assert [part async for part in first.parts()] == [b"one ", b"three"]
    await wait_idle(dispatcher)


async def test_a_stream_that_fails_midway_raises_the_error():
    dispatcher, _, peer = await start_dispatcher()
    [job], frame = await send(dispatcher, peer, b"x")
    await peer.stream(frame, b"one ")
    await peer.answer(frame, (503, b"", b"Prediction failed"))
    parts = (await answer_of(job)).parts()
    assert await anext(parts) == b"one "
    with pytest.raises(PredictionFailed, match="Prediction failed"):
        await anext(parts)


async def test_a_partial_batch_is_sent_after_the_batch_delay():
    dispatcher, _, peer = await start_dispatcher(8, wait=0.05)
    jobs = submit(dispatcher, b"a")
    await asyncio.sleep(0)
    jobs += submit(dispatcher, b"b")
    frame = await peer.read()
    assert len(frame.items) == 2
    assert time.monotonic() - jobs[0].arrived >= 0.05


async def test_metric_deltas_are_added_up():
    dispatcher, _, peer = await start_dispatcher()
    delta = {
        "name": "Tokens",
        "type": "counter",
        "unit": "count",
        "value": 2.0,
        "dimensions": {"ModelName": "m"},
    }
    for _ in range(2):
        [job] = submit(dispatcher, b"x")
        await peer.reply(await peer.read(), NO_TIMES + json.dumps([delta]).encode())
        await answer(job)
    [(key, metric)] = dispatcher.stats.handler_metrics.items()
    assert key == ("Tokens", "counter", "count", (("ModelName", "m"),))
    assert (metric.sum, metric.count, metric.last) == (4.0, 2, 2.0)


OK = (200, b"", b"")


@pytest.mark.parametrize(
    "buffers",
    [
        [b"\xff" * 64],
        wire.encode(wire.Kind.REPLY, 77, [OK]),
        wire.encode(wire.Kind.REPLY, 1, [OK, OK]),
        wire.encode(wire.Kind.REPLY, 1, [OK], b"[]"),
        wire.encode(wire.Kind.PIECE, 1, [(9, b"", b"")]),
        wire.encode(wire.Kind.BATCH, 1, []),
        wire.encode(wire.Kind.LOADED, 0, extra=b"not json"),
        wire.encode(wire.Kind.REPORT, 0, extra=b'{"lost": "' + b"x" * MAX_REPORT_BYTES + b'"}'),
    ],
)
async def test_a_worker_that_sends_invalid_frames_is_disconnected(buffers):
    dispatcher, channel, peer = await start_dispatcher()
    submit(dispatcher, b"x")
    await peer.read()
    await peer.write(*buffers)
    await asyncio.wait_for(channel.closed, TIMEOUT)
    assert len(channel.sent) == 1
    assert channel not in dispatcher.channels


async def test_a_worker_reports_its_load_or_the_reason_of_its_failure():
    dispatcher = Dispatcher("Model", BatchLimits(4), Bounds(10))
    channel, peer = await connect(dispatcher)
    await peer.write(*wire.encode(wire.Kind.LOADED, 0, extra=b'{"device": "cpu"}'))
    assert await asyncio.wait_for(channel.loaded, TIMEOUT) == {"device": "cpu"}
    channel, peer = await connect(dispatcher)
    await peer.write(
        *wire.encode(
            wire.Kind.FAILED, 0, extra=b'{"message": "no weights", "traceback": "Traceback"}'
        )
    )
    with pytest.raises(LoadFailed, match="no weights"):
        await asyncio.wait_for(channel.loaded, TIMEOUT)
    channel, peer = await connect(dispatcher)
    peer.close()
    with pytest.raises(EOFError):
        await asyncio.wait_for(channel.loaded, TIMEOUT)


async def test_a_deadline_is_enforced_while_all_workers_are_busy():
    dispatcher, _, _ = await start_busy_dispatcher()
    [late_job, patient_job] = submit(
        dispatcher, a_waiting_job(deadline=time.monotonic() + 0.03), b"x"
    )
    refusal = await refusal_of(late_job, DeadlinePassed, "before its deadline")
    assert refusal.retry_after == 1
    assert not patient_job.done.done()
    assert list(dispatcher.queue.jobs) == [patient_job]


async def test_a_refusal_during_loading_gives_retry_after():
    dispatcher = Dispatcher('Model "m" [Version 1.0]', BatchLimits(1), Bounds(1))
    dispatcher.accept(True)
    submit(dispatcher, b"waits")
    for seconds, retry_after in ((41.2, 42), (3.0, 3), (None, 1)):
        dispatcher.seconds_until_ready = lambda seconds=seconds: seconds
        error = await overflow(dispatcher, f"try again in {retry_after} s")
        assert error.retry_after == retry_after
    channel, peer = await connect(dispatcher)
    dispatcher.seconds_until_ready = lambda: 1000.0
    dispatcher.add(channel)
    await peer.read()
    submit(dispatcher, b"waits")
    error = await overflow(dispatcher)
    assert error.retry_after == 1
    peer.close()


async def test_a_closed_dispatcher_leaves_no_timer():
    dispatcher, _, peer = await start_busy_dispatcher()
    dispatcher.submit(a_waiting_job(b"late", time.monotonic() + 600))
    await asyncio.sleep(0)
    timers = [
        handle
        for handle in asyncio.get_running_loop()._scheduled
        if handle._callback == dispatcher._on_timer
    ]
    assert timers
    dispatcher.close()
    assert all(handle.cancelled() for handle in timers)
    peer.close()


async def test_the_more_urgent_is_served_first():
    dispatcher, _, peer = await start_dispatcher(1)
    now = time.monotonic()
    submit(dispatcher, b"before")
    frames = [await peer.read()]
    submit(
        dispatcher,
        a_waiting_job(b"3"),
        a_waiting_job(b"2", now + 90),
        a_waiting_job(b"1", now + 60),
        a_waiting_job(b"0", priority=1),
        a_waiting_job(b"4", now + 30, -1),
    )
    completion_order = []
    for _ in range(5):
        await peer.reply(frames.pop(0))
        frames.append(await peer.read())
        completion_order.append(bytes(frames[-1].items[0][2]))
    assert completion_order == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_request_starts_early_enough_to_meet_its_deadline():
    dispatcher, _, _ = await start_busy_dispatcher()
    dispatcher.service_rate.add(2, 10.0, 10.0)
    urgent_job, relaxed_job = (
        a_waiting_job(deadline=time.monotonic() + 0.04),
        a_waiting_job(deadline=time.monotonic() + 60),
    )
    arrived, deadline = urgent_job.arrived, urgent_job.deadline
    submit(dispatcher, urgent_job, relaxed_job)
    await refusal_of(urgent_job, DeadlinePassed)
    assert time.monotonic() >= (arrived + deadline) / 2
    assert relaxed_job.deadline == pytest.approx(relaxed_job.arrived + 50, abs=0.1)


async def test_a_client_that_leaves_frees_its_place_at_once():
    dispatcher, _, _ = await start_busy_dispatcher(1, items=2)
    first, second = submit(dispatcher, b"1", b"2")
    dispatcher.leave(first)
    [third] = submit(dispatcher, b"3")
    await refusal_of(first, ClientLeft)
    assert list(dispatcher.queue.jobs) == [second, third]
    assert dispatcher.stats.refusals == {"ClientLeft": 1}


async def test_batches_and_suspects_without_clients_do_not_run():
    dispatcher, channel, peer = await start_dispatcher()
    suspect_jobs = submit(dispatcher, b"1", b"2", b"3", b"4")
    await peer.read()
    dispatcher.retry_lost(await kill(channel, peer), channel.streaming, DIED)
    waiting_job = submit(dispatcher, b"5")
    for job in (*suspect_jobs[2:], *waiting_job):
        dispatcher.leave(job)
    for job in (*suspect_jobs[2:], *waiting_job):
        await refusal_of(job, ClientLeft)
    second, new_peer = await add_worker(dispatcher)
    frame = await new_peer.read()
    assert bodies(frame) == [b"1", b"2"]
    await new_peer.reply(frame)
    await wait_idle(dispatcher)
    assert not second.sent


async def test_a_client_that_leaves_while_its_request_runs_is_counted_once():
    dispatcher, _, peer = await start_dispatcher()
    [leaving_job, staying_job], frame = await send(dispatcher, peer, b"1", b"2")
    dispatcher.leave(leaving_job)
    dispatcher.leave(leaving_job)
    await peer.reply(frame)
    assert await answer(staying_job) == b"2"
    await wait_idle(dispatcher)
    assert (dispatcher.stats.answers, dispatcher.stats.refusals) == ({200: 2}, {})


@pytest.mark.parametrize("is_retired", [False, True])
async def test_only_the_late_request_of_a_batch_is_refused(is_retired):
    dispatcher, channel, peer = await start_dispatcher()
    [late_job, patient_job], frame = await send(
        dispatcher, peer, a_waiting_job(b"late", soon()), b"patient"
    )
    if is_retired:
        dispatcher.remove(channel)
    refusal = await refusal_of(late_job, DeadlinePassed, "did not answer")
    assert refusal.retry_after == 1
    assert not patient_job.done.done()
    assert counts(dispatcher) == (2, {}, {"AnswerLate": 1})
    assert dispatcher.in_flight == 2
    await peer.reply(frame)
    assert await answer(patient_job) == b"patient"
    assert counts(dispatcher) == (2, {200: 1}, {"AnswerLate": 1})
    assert (dispatcher.in_flight, dispatcher._deadlines) == (0, {})
    await wait_idle(dispatcher)


async def test_a_running_batch_without_clients_is_cancelled():
    dispatcher, _, peer = await start_dispatcher()
    [late_job, leaving_job], frame = await send(
        dispatcher, peer, a_waiting_job(b"late", soon()), b"leaving"
    )
    await refusal_of(late_job, DeadlinePassed)
    dispatcher.leave(leaving_job)
    cancel_frame = await peer.read()
    assert (cancel_frame.kind, cancel_frame.batch) == (wire.Kind.CANCEL, frame.batch)
    await peer.reply(frame)
    assert (await answer(leaving_job), counts(dispatcher)) == (
        b"leaving",
        (2, {200: 1}, {"AnswerLate": 1}),
    )
    dispatcher.submit(only_late_job := a_waiting_job(b"alone", soon()))
    frame = await peer.read()
    await refusal_of(only_late_job, DeadlinePassed)
    assert (await peer.read()).kind is wire.Kind.CANCEL
    busy_before = dispatcher.stats.busy_seconds
    await peer.reply(frame)
    await wait_idle(dispatcher)
    assert counts(dispatcher) == (3, {200: 1}, {"AnswerLate": 2})
    # The worker's time is counted nevertheless.
    assert dispatcher.stats.busy_seconds > busy_before
    assert dispatcher.service_rate.answer_time > 0


async def test_a_started_stream_continues_past_its_deadline():
    dispatcher, _, peer = await start_dispatcher()
    started_job, late_job = a_waiting_job(b"begun", now := soon()), a_waiting_job(b"late", now)
    _, frame = await send(dispatcher, peer, started_job, late_job)
    await peer.stream(frame, b"one ")
    first = await answer_of(started_job)
    await refusal_of(late_job, DeadlinePassed)
    await peer.stream(frame, b"to nobody", index=1)
    await peer.answer(frame, (200, b"", b"two"), (200, b"", b"to nobody"))
    assert [part async for part in first.parts()] == [b"one ", b"two"]
    assert counts(dispatcher) == (2, {200: 1}, {"AnswerLate": 1})


@pytest.mark.parametrize("deadline_passes", ["alive", "dead", "queued"])
@pytest.mark.parametrize("end", ["retry_lost", "requeue"])
async def test_a_worker_death_with_a_late_request_counts_every_request_once(deadline_passes, end):
    """Let the deadline pass while the worker is alive, dead, or its requests are queued again."""

    async def kill_worker() -> None:
        peer.close()
        await channel.closed

    def queue_again() -> None:
        getattr(dispatcher, end)(channel.sent.popleft(), channel.streaming, DIED)

    dispatcher, channel, peer = await start_dispatcher()
    late_job = a_waiting_job(b"late", soon())
    [_, first, second], _ = await send(dispatcher, peer, late_job, b"first", b"second")
    if deadline_passes != "alive":
        await kill_worker()
    if deadline_passes == "queued":
        queue_again()
    await refusal_of(late_job, AnswerLate, "did not answer")
    if deadline_passes == "alive":
        await kill_worker()
    if deadline_passes != "queued":
        queue_again()
    _, peer = await add_worker(dispatcher)
    served_bodies = []
    while not (first.done.done() and second.done.done()):
        served_bodies += await peer.serve()
        await asyncio.wait(
            [first.done, second.done], timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED
        )
    assert served_bodies == [b"first", b"second"]
    await wait_idle(dispatcher)
    assert counts(dispatcher) == (3, {200: 2}, {"AnswerLate": 1})
    assert not dispatcher._deadlines
    assert not dispatcher._restarted


async def test_waiting_bytes_are_limited_except_for_a_single_request():
    dispatcher, _, _ = await start_busy_dispatcher(1, items=10, size=100)
    [large_job] = submit(dispatcher, bytes(200))
    await overflow(dispatcher, r"requests with 200 bytes wait \(maxQueueBytes\)")
    dispatcher.leave(large_job)
    submit(dispatcher, bytes(60), bytes(40))
    await overflow(dispatcher)
    assert dispatcher.queue.size == 100
    submit(dispatcher, *[b""] * 8)
    await overflow(dispatcher, "10 requests wait", body=b"")


async def test_retry_after_is_computed_from_the_measured_service_rate():
    dispatcher, _, _ = await start_busy_dispatcher(2, items=6, overload_status=429)
    # One worker answers 2 requests a second, so 6 take 3 seconds.
    dispatcher.service_rate.add(2, 1.0, 1.0)
    [*_, refused_job] = submit(dispatcher, *[b"x"] * 7)
    error = await refusal_of(refused_job, QueueFull, "6 requests wait")
    assert (error.status, error.retry_after) == (429, 3)


async def test_limits_can_change_while_requests_wait():
    dispatcher, _, peer = await start_dispatcher(8, wait=60.0, items=2)
    submit(dispatcher, b"1", b"2")
    await overflow(dispatcher)
    dispatcher.change(BatchLimits(1), Bounds(5))
    assert len((await peer.read()).items) == 1
    submit(dispatcher, *[b"x"] * 4)
    assert len(dispatcher.queue) == 5


async def test_the_service_rate_is_measured_from_reply_to_reply():
    dispatcher, channel, peer = await start_busy_dispatcher()
    for sent_batch in list(channel.sent):
        items = [(200, b"", b"")] * len(sent_batch.jobs)
        await peer.write(*wire.encode(wire.Kind.REPLY, sent_batch.batch, items))
        await answer(sent_batch.jobs[-1])
    assert dispatcher.service_rate.rate > 0
    assert 0 < dispatcher.service_rate.answer_time < TIMEOUT


async def test_a_full_queue_drops_its_least_urgent_request_for_a_priority():
    dispatcher, _, _ = await start_busy_dispatcher(1, items=3)
    [low_job, plain_job, later_job] = submit(dispatcher, a_waiting_job(priority=-1), b"x", b"x")
    [refused_job] = submit(dispatcher, b"x")
    await refusal_of(low_job, QueueFull)
    assert not refused_job.done.done()
    important_job = a_waiting_job(priority=5)
    dispatcher.submit(important_job)
    await refusal_of(refused_job, QueueFull)
    assert list(dispatcher.queue.jobs) == [important_job, plain_job, later_job]
    [equal] = submit(dispatcher, b"x")
    await refusal_of(equal, QueueFull)
    assert dispatcher.queue.size == 3


async def test_a_lost_request_without_a_client_is_not_retried():
    dispatcher, channel, peer = await start_dispatcher(1)
    [started_job] = submit(dispatcher, b"1")
    await peer.read()
    [early_job] = submit(dispatcher, b"2")
    await peer.read()
    dispatcher.leave(started_job)
    dispatcher.leave(early_job)
    await asyncio.sleep(0)
    # This flush removes jobs whose clients have left; none of them is in the queue.
    submit(dispatcher, b"3")
    await asyncio.sleep(0)
    dispatcher.retry_lost(await kill(channel, peer), channel.streaming, DIED)
    _, new_peer = await add_worker(dispatcher)
    assert [bytes(body) for _, _, body in (await new_peer.read()).items] == [b"3"]
    assert dispatcher.stats.refusals["ClientLeft"] == 1


async def test_a_closed_channel_gets_no_batch():
    dispatcher = Dispatcher('Model "m" [Version 1.0]', BatchLimits(4), Bounds())
    dispatcher.accept(True)
    channel, peer = await connect(dispatcher)
    peer.close()
    await asyncio.wait_for(asyncio.shield(channel.closed), TIMEOUT)
    [waiting_job] = submit(dispatcher, b"1")
    dispatcher.add(channel)
    _, second = await add_worker(dispatcher)
    await second.serve()
    assert await answer(waiting_job) == b"1"


async def test_an_aborted_channel_gets_no_further_batch():
    dispatcher, channel, _ = await start_dispatcher()
    channel.abort()
    [waiting_job] = submit(dispatcher, b"1")
    _, second = await add_worker(dispatcher)
    await second.serve()
    assert await answer(waiting_job) == b"1"


class TimedJob(WaitingJob):
    """A job that remembers the batch in which it was answered."""

    def answer(self, status, headers, body, batch):
        self.batch = batch
        super().answer(status, headers, body, batch)


def a_timed_job() -> TimedJob:
    return TimedJob(wire.request_meta("id", b"", []), b"", time.monotonic())


async def test_queue_time_ends_when_a_worker_is_free():
    dispatcher, _, peer = await start_dispatcher(2)
    [first], frame = await send(dispatcher, peer, a_timed_job())
    later_jobs = submit(dispatcher, a_timed_job(), a_timed_job())
    early_frame = await peer.read()
    start_s = time.monotonic()
    await peer.reply(frame, wire.TIMES.pack(start_s, 0.0, math.nan, 0.0, math.nan))
    await answer(first)
    await peer.reply(early_frame, wire.TIMES.pack(time.monotonic(), 1e9, 2.0, -1.0, math.nan))
    await answer(later_jobs[1])
    single_times, pair_times = times_of(first.batch), times_of(later_jobs[0].batch)
    assert later_jobs[0].batch is later_jobs[1].batch
    assert (single_times.size, pair_times.size) == (1, 2)
    assert (
        single_times.free
        <= first.arrived
        <= single_times.sent
        <= single_times.began
        == start_s
        <= single_times.answered
    )
    assert single_times.queue(first.arrived) == 0.0
    assert single_times.wait(first.arrived) == start_s - first.arrived
    # The worker reports an impossible duration; it is limited to the time since the send.
    assert pair_times.free == pair_times.sent == pair_times.began
    assert pair_times.preprocess == pair_times.answered - pair_times.sent
    assert math.isnan(pair_times.inference)


async def test_one_loop_iteration_reads_a_bounded_number_of_stream_pieces():
    class CountingJob(WaitingJob):
        pieces = 0

        def piece(self, headers, body, flow):
            self.pieces += 1
            super().piece(headers, body, flow)

    async def read():
        return [part async for part in (await streaming.done).parts()]

    dispatcher, channel, peer = await start_dispatcher()
    streaming = CountingJob(wire.request_meta("id", b"", []), b"x", time.monotonic(), None, 0)
    _, frame = await send(dispatcher, peer, streaming)
    parts = [b"%d " % number for number in range(20_000)]
    pieces = [
        buffer
        for part in parts
        for buffer in wire.encode(wire.Kind.PIECE, frame.batch, [(0, b"", part)])
    ]
    end = wire.encode(wire.Kind.REPLY, frame.batch, [(200, b"", b"end")])
    write_task = asyncio.ensure_future(peer.write(*pieces, *end))
    read_task = asyncio.ensure_future(read())
    max_per_turn = 0
    while not read_task.done():
        count_before = streaming.pieces
        await asyncio.sleep(0)
        max_per_turn = max(max_per_turn, streaming.pieces - count_before)
    assert await read_task == [*parts, b"end"]
    # One read, and one iteration for the pieces that had arrived before.
    assert 1 < max_per_turn <= 2 * (MAX_PIECES_PER_TURN + 1)
    await write_task
    assert channel.answered == 1


async def test_long_batches_are_not_sent_ahead():
    dispatcher, channel, peer = await start_dispatcher(1)
    dispatcher.service_rate.has_short_batches = False
    submit(dispatcher, b"running", b"waiting")
    await peer.read()
    dispatcher._flush()
    assert channel.batches == 1


async def test_a_closed_connection_is_not_pinged():
    """Avoid the TypeError that closed asyncio transports raise from Python 3.12 on."""
    own_socket, other_socket = socket.socketpair()
    with other_socket:
        channel, written_data = Channel(None), []
        channel._transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            asyncio.Protocol, own_socket
        )
        channel._transport.writelines = written_data.extend
        channel.ping()
        channel._transport.close()
        channel.ping()
        assert len(written_data) == len(wire.encode(wire.Kind.PING, 0))


def test_a_configuration_whose_feature_is_absent_is_refused():
    with pytest.raises(BadRequest, match="configured with splitRows, continuousBatching, for"):
        make_dispatcher("m", BatchLimits(1), Bounds(), Strategy("continuous", split_rows=8))
