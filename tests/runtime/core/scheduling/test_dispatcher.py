"""The dispatcher and its channels, against workers' ends that the test moves."""

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
from tsx_runtime.core.telemetry.batch_times import NO_TIMES, times_of
from tsx_runtime.errors import (
    AnswerLate,
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
    """Start a dispatcher with one worker, whose batches it takes for short ones."""
    dispatcher = Dispatcher(
        'Model "m" [Version 1.0]', BatchLimits(batch, wait=wait), Bounds(**bounds)
    )
    dispatcher.service_rate.short = True
    return await serve(dispatcher)


async def start_busy_dispatcher(batch: int = 2, **bounds: int):
    """Start a dispatcher whose only worker holds all that it takes."""
    dispatcher, channel, peer = await start_dispatcher(batch, **bounds)
    for _ in range(2):
        submit(dispatcher, *[b"before"] * batch)
        await peer.read()
    return dispatcher, channel, peer


async def test_requests_that_arrive_together_are_one_batch_and_get_their_own_answers():
    dispatcher, _, peer = await start_dispatcher()
    jobs, frame = await send(dispatcher, peer, b"a", b"b", b"c")
    assert bodies(frame) == [b"a", b"b", b"c"]
    await peer.reply(frame)
    assert [await answer(job) for job in jobs] == [b"a", b"b", b"c"]
    assert (await jobs[0].done).headers == b"x-n: 1\r\n"
    assert dispatcher.stats.batch_sizes == {3: 1}
    assert dispatcher.stats.answers == {200: 3}


@pytest.mark.parametrize("size", [300_000, 5_000_000])
async def test_bodies_larger_than_the_read_buffer_come_back_whole(size):
    dispatcher, _, peer = await start_dispatcher()
    bodies = [bytes([number]) * size for number in range(3)]
    jobs, frame = await send(dispatcher, peer, *bodies)
    await asyncio.gather(peer.reply(frame), *(answer(job) for job in jobs))
    assert [await answer(job) for job in jobs] == bodies


async def test_a_full_queue_refuses_at_once():
    dispatcher, _, peer = await start_dispatcher(1, items=2)
    first = submit(dispatcher, b"1")
    await peer.read()
    # The only worker may hold one more full batch.
    early = submit(dispatcher, b"2")
    await peer.read()
    submit(dispatcher, b"3", b"4")
    await overflow(dispatcher, "2 requests wait")
    assert not first[0].done.done()
    assert not early[0].done.done()


async def test_a_burst_is_not_refused_while_workers_idle():
    dispatcher, _, peer = await start_dispatcher(items=4)
    jobs = submit(dispatcher, *[bytes([number]) for number in range(8)])
    for _ in range(2):
        await peer.serve()
    assert [await answer(job) for job in jobs] == [bytes([number]) for number in range(8)]


async def test_without_a_worker_a_request_is_refused_and_with_one_on_its_way_it_waits():
    dispatcher = Dispatcher("Model", BatchLimits(4), Bounds(10))
    await refusal_of(submit(dispatcher, b"a")[0], NoWorker)
    dispatcher.accept(True)
    [waiting] = submit(dispatcher, b"b")
    channel, peer = await add_worker(dispatcher)
    await peer.serve()
    assert await answer(waiting) == b"b"
    [last] = submit(dispatcher, b"c")
    dispatcher.remove(channel)
    dispatcher.accept(False)
    await refusal_of(last, NoWorker)


async def test_requests_that_a_dead_worker_had_not_begun_keep_their_places():
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


async def test_requests_that_the_last_worker_had_not_begun_are_refused_when_it_dies():
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


async def test_after_a_death_requests_are_tried_in_halves_and_then_alone():
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


async def test_a_request_whose_answer_has_begun_is_not_tried_again():
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


async def test_a_request_whose_client_is_gone_or_whose_deadline_has_passed_is_not_run():
    dispatcher, _, peer = await start_dispatcher()
    [gone, late, fine] = submit(
        dispatcher, b"gone", a_waiting_job(b"late", deadline=time.monotonic() - 1), b"fine"
    )
    dispatcher.leave(gone)
    frame = await peer.read()
    assert bodies(frame) == [b"fine"]
    for job in (gone, late):
        await refusal_of(job, Unavailable)
    await peer.reply(frame)
    assert await answer(fine) == b"fine"


async def test_a_streamed_answer_arrives_in_pieces_and_ends_with_the_reply():
    dispatcher, _, peer = await start_dispatcher()
    [job], frame = await send(dispatcher, peer, b"x")
    await peer.stream(frame, b"one ", b"a: b\r\n")
    first = await answer_of(job)
    assert first.streamed
    assert first.headers == b"a: b\r\n"
    await peer.stream(frame, b"two ")
    await peer.answer(frame, (200, b"", b"three"))
    assert [part async for part in first.parts()] == [b"one ", b"two ", b"three"]


async def test_pieces_that_nobody_waits_for_are_not_kept():
    dispatcher, _, peer = await start_dispatcher()
    [job], frame = await send(dispatcher, peer, b"x")
    await peer.stream(frame, b"one ")
    first = await answer_of(job)
    job.gone = True
    await peer.stream(frame, b"two ")
    await peer.answer(frame, (200, b"", b"three"))
    assert [part async for part in first.parts()] == [b"one ", b"three"]
    await wait_idle(dispatcher)


async def test_a_stream_that_fails_in_the_middle_ends_with_the_error_and_not_with_its_text():
    dispatcher, _, peer = await start_dispatcher()
    [job], frame = await send(dispatcher, peer, b"x")
    await peer.stream(frame, b"one ")
    await peer.answer(frame, (503, b"", b"Prediction failed"))
    parts = (await answer_of(job)).parts()
    assert await anext(parts) == b"one "
    with pytest.raises(PredictionFailed, match="Prediction failed"):
        await anext(parts)


async def test_a_model_that_waits_for_company_sends_when_the_wait_is_over():
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
async def test_a_worker_that_does_not_keep_to_the_format_is_cut_off(buffers):
    dispatcher, channel, peer = await start_dispatcher()
    submit(dispatcher, b"x")
    await peer.read()
    await peer.write(*buffers)
    await asyncio.wait_for(channel.closed, TIMEOUT)
    assert len(channel.sent) == 1
    assert channel not in dispatcher.channels


async def test_a_worker_reports_that_it_has_loaded_or_why_not():
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


async def test_a_deadline_is_acted_on_while_every_worker_is_busy():
    dispatcher, _, _ = await start_busy_dispatcher()
    [late, patient] = submit(dispatcher, a_waiting_job(deadline=time.monotonic() + 0.03), b"x")
    refused = await refusal_of(late, DeadlinePassed, "before its deadline")
    assert refused.retry_after == 1
    assert not patient.done.done()
    assert list(dispatcher.queue.jobs) == [patient]


async def test_a_refusal_while_workers_load_says_when_one_will_serve():
    dispatcher = Dispatcher('Model "m" [Version 1.0]', BatchLimits(1), Bounds(1))
    dispatcher.accept(True)
    submit(dispatcher, b"waits")
    for seconds, reported in ((41.2, 42), (3.0, 3), (None, 1)):
        dispatcher.seconds_until_ready = lambda seconds=seconds: seconds
        exc_info = await overflow(dispatcher, f"try again in {reported} s")
        assert exc_info.retry_after == reported
    channel, peer = await connect(dispatcher)
    dispatcher.seconds_until_ready = lambda: 1000.0
    dispatcher.add(channel)
    await peer.read()
    submit(dispatcher, b"waits")
    exc_info = await overflow(dispatcher)
    assert exc_info.retry_after == 1
    peer.close()


async def test_a_dispatcher_that_is_closed_leaves_no_timer_behind():
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
    order = []
    for _ in range(5):
        await peer.reply(frames.pop(0))
        frames.append(await peer.read())
        order.append(bytes(frames[-1].items[0][2]))
    assert order == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_request_is_begun_early_enough_for_its_answer_to_be_in_time():
    dispatcher, _, _ = await start_busy_dispatcher()
    dispatcher.service_rate.add(2, 10.0, 10.0)
    hurried, far = (
        a_waiting_job(deadline=time.monotonic() + 0.04),
        a_waiting_job(deadline=time.monotonic() + 60),
    )
    arrived, deadline = hurried.arrived, hurried.deadline
    submit(dispatcher, hurried, far)
    await refusal_of(hurried, DeadlinePassed)
    assert time.monotonic() >= (arrived + deadline) / 2
    assert far.deadline == pytest.approx(far.arrived + 50, abs=0.1)


async def test_a_client_that_leaves_gives_up_its_place_at_once():
    dispatcher, _, _ = await start_busy_dispatcher(1, items=2)
    first, second = submit(dispatcher, b"1", b"2")
    dispatcher.leave(first)
    [third] = submit(dispatcher, b"3")
    await refusal_of(first, ClientLeft)
    assert list(dispatcher.queue.jobs) == [second, third]
    assert dispatcher.stats.refusals == {"ClientLeft": 1}


async def test_neither_a_batch_nor_suspects_run_once_all_clients_have_left():
    dispatcher, channel, peer = await start_dispatcher()
    suspects = submit(dispatcher, b"1", b"2", b"3", b"4")
    await peer.read()
    dispatcher.retry_lost(await kill(channel, peer), channel.streaming, DIED)
    waiting = submit(dispatcher, b"5")
    for job in (*suspects[2:], *waiting):
        dispatcher.leave(job)
    for job in (*suspects[2:], *waiting):
        await refusal_of(job, ClientLeft)
    second, new_peer = await add_worker(dispatcher)
    frame = await new_peer.read()
    assert bodies(frame) == [b"1", b"2"]
    await new_peer.reply(frame)
    await wait_idle(dispatcher)
    assert not second.sent


async def test_a_client_that_leaves_while_its_request_runs_is_counted_once():
    dispatcher, _, peer = await start_dispatcher()
    [leaving, staying], frame = await send(dispatcher, peer, b"1", b"2")
    dispatcher.leave(leaving)
    dispatcher.leave(leaving)
    await peer.reply(frame)
    assert await answer(staying) == b"2"
    await wait_idle(dispatcher)
    assert (dispatcher.stats.answers, dispatcher.stats.refusals) == ({200: 2}, {})


@pytest.mark.parametrize("retired", [False, True])
async def test_a_request_that_runs_past_its_deadline_is_refused_alone(
    retired,
):
    dispatcher, channel, peer = await start_dispatcher()
    [late, patient], frame = await send(
        dispatcher, peer, a_waiting_job(b"late", soon()), b"patient"
    )
    if retired:
        dispatcher.remove(channel)
    refused = await refusal_of(late, DeadlinePassed, "did not answer")
    assert refused.retry_after == 1
    assert not patient.done.done()
    assert counts(dispatcher) == (2, {}, {"AnswerLate": 1})
    assert dispatcher.in_flight == 2
    await peer.reply(frame)
    assert await answer(patient) == b"patient"
    assert counts(dispatcher) == (2, {200: 1}, {"AnswerLate": 1})
    assert (dispatcher.in_flight, dispatcher._due) == (0, {})
    await wait_idle(dispatcher)


async def test_a_batch_for_which_no_client_waits_any_more_is_called_off():
    dispatcher, _, peer = await start_dispatcher()
    [late, leaving], frame = await send(
        dispatcher, peer, a_waiting_job(b"late", soon()), b"leaving"
    )
    await refusal_of(late, DeadlinePassed)
    dispatcher.leave(leaving)
    called_off = await peer.read()
    assert (called_off.kind, called_off.batch) == (wire.Kind.CANCEL, frame.batch)
    await peer.reply(frame)
    assert (await answer(leaving), counts(dispatcher)) == (
        b"leaving",
        (2, {200: 1}, {"AnswerLate": 1}),
    )
    dispatcher.submit(alone := a_waiting_job(b"alone", soon()))
    frame = await peer.read()
    await refusal_of(alone, DeadlinePassed)
    assert (await peer.read()).kind is wire.Kind.CANCEL
    before = dispatcher.stats.busy_seconds
    await peer.reply(frame)
    await wait_idle(dispatcher)
    assert counts(dispatcher) == (3, {200: 1}, {"AnswerLate": 2})
    # The time of the worker counts all the same.
    assert dispatcher.stats.busy_seconds > before
    assert dispatcher.service_rate.answer_time > 0


async def test_an_answer_that_has_begun_to_stream_is_not_broken_off_at_the_deadline():
    dispatcher, _, peer = await start_dispatcher()
    begun, late = a_waiting_job(b"begun", now := soon()), a_waiting_job(b"late", now)
    _, frame = await send(dispatcher, peer, begun, late)
    await peer.stream(frame, b"one ")
    first = await answer_of(begun)
    await refusal_of(late, DeadlinePassed)
    await peer.stream(frame, b"to nobody", index=1)
    await peer.answer(frame, (200, b"", b"two"), (200, b"", b"to nobody"))
    assert [part async for part in first.parts()] == [b"one ", b"two"]
    assert counts(dispatcher) == (2, {200: 1}, {"AnswerLate": 1})


@pytest.mark.parametrize("deadline_passes", ["alive", "dead", "queued"])
@pytest.mark.parametrize("end", ["retry_lost", "requeue"])
async def test_a_worker_that_dies_with_a_late_request_loses_and_doubles_nothing(
    deadline_passes, end
):
    """The deadline passes while the worker is alive, dead, or its requests are queued again."""

    async def die() -> None:
        peer.close()
        await channel.closed

    def queue_again() -> None:
        getattr(dispatcher, end)(channel.sent.popleft(), channel.streaming, DIED)

    dispatcher, channel, peer = await start_dispatcher()
    late = a_waiting_job(b"late", soon())
    [_, first, second], _ = await send(dispatcher, peer, late, b"first", b"second")
    if deadline_passes != "alive":
        await die()
    if deadline_passes == "queued":
        queue_again()
    await refusal_of(late, AnswerLate, "did not answer")
    if deadline_passes == "alive":
        await die()
    if deadline_passes != "queued":
        queue_again()
    _, peer = await add_worker(dispatcher)
    served = []
    while not (first.done.done() and second.done.done()):
        served += await peer.serve()
        await asyncio.wait(
            [first.done, second.done], timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED
        )
    assert served == [b"first", b"second"]
    await wait_idle(dispatcher)
    assert counts(dispatcher) == (3, {200: 2}, {"AnswerLate": 1})
    assert not dispatcher._due
    assert not dispatcher._begun


async def test_bytes_that_wait_are_bounded_and_one_request_alone_may_exceed_the_bound():
    dispatcher, _, _ = await start_busy_dispatcher(1, items=10, size=100)
    [large] = submit(dispatcher, bytes(200))
    await overflow(dispatcher, r"requests with 200 bytes wait \(maxQueueBytes\)")
    dispatcher.leave(large)
    submit(dispatcher, bytes(60), bytes(40))
    await overflow(dispatcher)
    assert dispatcher.queue.size == 100
    submit(dispatcher, *[b""] * 8)
    await overflow(dispatcher, "10 requests wait", body=b"")


async def test_a_refusal_says_when_to_come_again_by_what_workers_were_measured_to_do():
    dispatcher, _, _ = await start_busy_dispatcher(2, items=6, overload_status=429)
    # One worker answers 2 requests a second, so 6 take 3 seconds.
    dispatcher.service_rate.add(2, 1.0, 1.0)
    [*_, refused] = submit(dispatcher, *[b"x"] * 7)
    exc_info = await refusal_of(refused, QueueFull, "6 requests wait")
    assert (exc_info.status, exc_info.retry_after) == (429, 3)


async def test_limits_and_bounds_change_while_requests_wait():
    dispatcher, _, peer = await start_dispatcher(8, wait=60.0, items=2)
    submit(dispatcher, b"1", b"2")
    await overflow(dispatcher)
    dispatcher.change(BatchLimits(1), Bounds(5))
    assert len((await peer.read()).items) == 1
    submit(dispatcher, *[b"x"] * 4)
    assert len(dispatcher.queue) == 5


async def test_the_pace_is_measured_from_reply_to_reply():
    dispatcher, channel, peer = await start_busy_dispatcher()
    for sent in list(channel.sent):
        items = [(200, b"", b"")] * len(sent.jobs)
        await peer.write(*wire.encode(wire.Kind.REPLY, sent.batch, items))
        await answer(sent.jobs[-1])
    assert dispatcher.service_rate.rate > 0
    assert 0 < dispatcher.service_rate.answer_time < TIMEOUT


async def test_the_least_urgent_request_of_a_full_queue_gives_way_to_a_greater_priority():
    dispatcher, _, _ = await start_busy_dispatcher(1, items=3)
    [low, plain, later] = submit(dispatcher, a_waiting_job(priority=-1), b"x", b"x")
    [refused] = submit(dispatcher, b"x")
    await refusal_of(low, QueueFull)
    assert not refused.done.done()
    important = a_waiting_job(priority=5)
    dispatcher.submit(important)
    await refusal_of(refused, QueueFull)
    assert list(dispatcher.queue.jobs) == [important, plain, later]
    [equal] = submit(dispatcher, b"x")
    await refusal_of(equal, QueueFull)
    assert dispatcher.queue.size == 3


async def test_a_request_whose_client_left_before_its_worker_died_is_not_run():
    dispatcher, channel, peer = await start_dispatcher(1)
    [begun] = submit(dispatcher, b"1")
    await peer.read()
    [early] = submit(dispatcher, b"2")
    await peer.read()
    dispatcher.leave(begun)
    dispatcher.leave(early)
    await asyncio.sleep(0)
    # This flush looks for clients that have left, and finds none in the queue.
    submit(dispatcher, b"3")
    await asyncio.sleep(0)
    dispatcher.retry_lost(await kill(channel, peer), channel.streaming, DIED)
    _, new_peer = await add_worker(dispatcher)
    assert [bytes(body) for _, _, body in (await new_peer.read()).items] == [b"3"]
    assert dispatcher.stats.refusals["ClientLeft"] == 1


async def test_a_channel_that_closed_before_it_was_added_gets_nothing():
    dispatcher = Dispatcher('Model "m" [Version 1.0]', BatchLimits(4), Bounds())
    dispatcher.accept(True)
    channel, peer = await connect(dispatcher)
    peer.close()
    await asyncio.wait_for(asyncio.shield(channel.closed), TIMEOUT)
    [waiting] = submit(dispatcher, b"1")
    dispatcher.add(channel)
    _, second = await add_worker(dispatcher)
    await second.serve()
    assert await answer(waiting) == b"1"


async def test_an_aborted_channel_gets_nothing_more():
    dispatcher, channel, _ = await start_dispatcher()
    channel.abort()
    [waiting] = submit(dispatcher, b"1")
    _, second = await add_worker(dispatcher)
    await second.serve()
    assert await answer(waiting) == b"1"


class TimedJob(WaitingJob):
    """A job that keeps the batch in which it was answered."""

    def answer(self, status, headers, body, batch):
        self.batch = batch
        super().answer(status, headers, body, batch)


def a_timed_job() -> TimedJob:
    return TimedJob(wire.request_meta("id", b"", []), b"", time.monotonic())


async def test_the_queue_ends_when_a_worker_is_free_and_the_worker_reports_its_own_times():
    dispatcher, _, peer = await start_dispatcher(2)
    [first], frame = await send(dispatcher, peer, a_timed_job())
    behind = submit(dispatcher, a_timed_job(), a_timed_job())
    early = await peer.read()
    began = time.monotonic()
    await peer.reply(frame, wire.TIMES.pack(began, 0.0, math.nan, 0.0, math.nan))
    await answer(first)
    await peer.reply(early, wire.TIMES.pack(time.monotonic(), 1e9, 2.0, -1.0, math.nan))
    await answer(behind[1])
    alone, pair = times_of(first.batch), times_of(behind[0].batch)
    assert behind[0].batch is behind[1].batch
    assert (alone.size, pair.size) == (1, 2)
    assert alone.free <= first.arrived <= alone.sent <= alone.began == began <= alone.answered
    assert alone.queue(first.arrived) == 0.0
    assert alone.wait(first.arrived) == began - first.arrived
    # Nobody else could have taken the pair, which cannot have run for longer than it was there.
    assert pair.free == pair.sent == pair.began
    assert pair.preprocess == pair.answered - pair.sent
    assert math.isnan(pair.inference)


async def test_a_turn_of_the_loop_reads_few_pieces_of_a_stream_however_many_have_come():
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
    writing = asyncio.ensure_future(peer.write(*pieces, *end))
    reading = asyncio.ensure_future(read())
    most = 0
    while not reading.done():
        before = streaming.pieces
        await asyncio.sleep(0)
        most = max(most, streaming.pieces - before)
    assert await reading == [*parts, b"end"]
    # A read, and a turn for the pieces that had come before.
    assert 1 < most <= 2 * (MAX_PIECES_PER_TURN + 1)
    await writing
    assert channel.answered == 1


async def test_batches_that_take_long_are_not_sent_early():
    dispatcher, channel, peer = await start_dispatcher(1)
    dispatcher.service_rate.short = False
    submit(dispatcher, b"running", b"waiting")
    await peer.read()
    dispatcher._flush()
    assert channel.batches == 1


async def test_a_closed_connection_is_not_asked_for_a_sign_of_life():
    """The transports of asyncio raise TypeError there, from Python 3.12 on."""
    ours, theirs = socket.socketpair()
    with theirs:
        channel, written = Channel(None), []
        channel._transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            asyncio.Protocol, ours
        )
        channel._transport.writelines = written.extend
        channel.ping()
        channel._transport.close()
        channel.ping()
        assert len(written) == len(wire.encode(wire.Kind.PING, 0))
