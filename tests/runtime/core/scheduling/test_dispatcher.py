"""The dispatcher and its channels against a peer that speaks the wire format from the other end of
a real socket.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time

import pytest

from tests.kit.jobs import a_waiting_job as job
from tsx_runtime import wire
from tsx_runtime.core.scheduling.channel import MOST_FACTS, PIECES_PER_TURN, Channel
from tsx_runtime.core.scheduling.dispatcher import Bounds, Dispatcher
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.core.telemetry.batch_times import NOTHING, times_of
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

TIMEOUT = 60.0


class Peer:
    """The worker's end of a channel, moved by the test."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self) -> wire.Frame:
        header = wire.decode_header(await self._exactly(wire.HEADER.size))
        return wire.decode(header, await self._exactly(header.size))

    async def write(self, *buffers: wire.Buffer) -> None:
        await self._loop.sock_sendall(self._sock, b"".join(bytes(buffer) for buffer in buffers))

    async def reply(self, frame: wire.Frame, extra: bytes = b"") -> None:
        """The echo of a batch."""
        items = [(200, b"x-n: 1\r\n", body) for _, _, body in frame.items]
        await self.write(*wire.encode(wire.Kind.REPLY, frame.batch, items, extra))

    def close(self) -> None:
        self._sock.close()

    async def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = await asyncio.wait_for(
                self._loop.sock_recv(self._sock, size - len(data)), TIMEOUT
            )
            assert part, "the channel was closed"
            data += part
        return data


async def connect(dispatcher: Dispatcher) -> tuple[Channel, Peer]:
    front, back = socket.socketpair()
    front.setblocking(False)
    back.setblocking(False)
    channel = dispatcher.new_channel()
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=front)
    return channel, Peer(back)


async def add_worker(dispatcher: Dispatcher) -> tuple[Channel, Peer]:
    channel, peer = await connect(dispatcher)
    dispatcher.add(channel)
    return channel, peer


async def started(
    limits: BatchLimits = BatchLimits(4),  # noqa: B008  # an immutable tuple
    bounds: Bounds = Bounds(),  # noqa: B008  # an immutable tuple
) -> tuple[Dispatcher, Channel, Peer]:
    dispatcher = Dispatcher('Model "m" [Version 1.0]', limits, bounds)
    dispatcher.service_rate.short = True  # as measured, until it is: a batch may be sent early
    dispatcher.accept(True)
    return dispatcher, *await add_worker(dispatcher)


async def busy(
    limits: BatchLimits = BatchLimits(2),  # noqa: B008  # an immutable tuple
    bounds: Bounds = Bounds(),  # noqa: B008  # an immutable tuple
) -> tuple[Dispatcher, Channel, Peer]:
    """Its only worker holds all that it takes."""
    dispatcher, channel, peer = await started(limits, bounds)
    for _ in range(2):
        submit(dispatcher, *[b"before"] * limits.max_items)
        await peer.read()
    return dispatcher, channel, peer


def submit(dispatcher: Dispatcher, *bodies: bytes) -> list[WaitingJob]:
    jobs = [job(body) for body in bodies]
    for each in jobs:
        dispatcher.submit(each)
    return jobs


async def answer(each: WaitingJob) -> bytes:
    return (await asyncio.wait_for(each.done, TIMEOUT)).body


async def test_what_arrives_together_leaves_together_and_answers_go_to_their_own_requests():
    dispatcher, _, peer = await started()
    jobs = submit(dispatcher, b"a", b"b", b"c")
    frame = await peer.read()
    assert [bytes(body) for _, _, body in frame.items] == [b"a", b"b", b"c"]
    await peer.reply(frame)
    assert [await answer(each) for each in jobs] == [b"a", b"b", b"c"]
    assert (await jobs[0].done).headers == b"x-n: 1\r\n"
    assert dispatcher.stats.batch_sizes == {3: 1}
    assert dispatcher.stats.answers == {200: 3}


@pytest.mark.parametrize("size", [300_000, 5_000_000])
async def test_bodies_larger_than_the_read_buffer_come_back_whole(size):
    dispatcher, _, peer = await started()
    bodies = [bytes([number]) * size for number in range(3)]
    jobs = submit(dispatcher, *bodies)
    frame = await peer.read()
    await asyncio.gather(peer.reply(frame), *(answer(each) for each in jobs))
    assert [await answer(each) for each in jobs] == bodies


async def test_a_full_queue_refuses_at_once():
    dispatcher, _, peer = await started(BatchLimits(1), bounds=Bounds(2))
    first = submit(dispatcher, b"1")
    await peer.read()
    early = submit(dispatcher, b"2")  # the only worker may hold one more full batch
    await peer.read()
    submit(dispatcher, b"3", b"4")
    [refused] = submit(dispatcher, b"5")
    with pytest.raises(
        QueueFull, match=r"has no worker to serve inference request.*2 requests wait"
    ):
        await answer(refused)
    assert not first[0].done.done()
    assert not early[0].done.done()


async def test_a_burst_is_not_refused_while_workers_idle():
    dispatcher, _, peer = await started(BatchLimits(4), bounds=Bounds(4))
    jobs = submit(dispatcher, *[bytes([number]) for number in range(8)])
    for _ in range(2):
        await peer.reply(await peer.read())
    assert [await answer(each) for each in jobs] == [bytes([number]) for number in range(8)]


async def test_without_a_worker_a_request_is_refused_and_with_one_on_its_way_it_waits():
    dispatcher = Dispatcher("Model", BatchLimits(4), Bounds(10))
    with pytest.raises(NoWorker):
        await answer(submit(dispatcher, b"a")[0])
    dispatcher.accept(True)
    [waiting] = submit(dispatcher, b"b")
    channel, peer = await add_worker(dispatcher)
    await peer.reply(await peer.read())
    assert await answer(waiting) == b"b"
    [left] = submit(dispatcher, b"c")
    dispatcher.remove(channel)
    dispatcher.accept(False)
    with pytest.raises(NoWorker):
        await answer(left)


async def test_when_a_worker_dies_what_it_had_not_begun_keeps_its_place():
    dispatcher, channel, peer = await started(BatchLimits(2))
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
    assert [bytes(body) for _, _, body in frame.items] == [b"3", b"4"]
    await new_peer.reply(frame)
    await new_peer.reply(await new_peer.read())
    assert [await answer(each) for each in jobs[2:]] == [b"3", b"4", b"5"]
    for each in jobs[:2]:
        with pytest.raises(WorkerDied):
            await answer(each)
    await asyncio.wait_for(dispatcher.wait_idle(), TIMEOUT)


async def test_when_the_last_worker_dies_on_its_way_out_what_it_had_not_begun_is_refused():
    dispatcher, channel, peer = await started(BatchLimits(1))
    jobs = submit(dispatcher, b"1")
    await peer.read()
    jobs += submit(dispatcher, b"2")
    await peer.read()
    dispatcher.remove(channel)
    dispatcher.accept(False)
    peer.close()
    with pytest.raises(NoWorker):
        await answer(jobs[1])
    dispatcher.refuse_all(channel.sent.popleft().jobs, WorkerDied("Worker died."))
    await asyncio.wait_for(dispatcher.wait_idle(), TIMEOUT)


async def test_after_a_death_requests_are_tried_in_halves_then_alone_and_the_one_that_did_it_is_refused():
    dispatcher = Dispatcher("Model", BatchLimits(8), Bounds(100))
    dispatcher.accept(True)
    jobs = submit(dispatcher, *[bytes([number]) for number in range(8)])
    sizes = []
    while not all(each.done.done() for each in jobs):
        channel, peer = await add_worker(dispatcher)
        while not channel.closed.done() and not all(each.done.done() for each in jobs):
            frame = await peer.read()
            sizes.append(len(frame.items))
            if any(body == b"\x05" for _, _, body in frame.items):
                peer.close()
                await channel.closed
                dispatcher.retry_lost(
                    channel.sent.popleft(), channel.streaming, WorkerDied("Worker died.")
                )
            else:
                await peer.reply(frame)
                await asyncio.wait_for(jobs[frame.items[0][2][0]].done, TIMEOUT)
    assert sizes == [8, 4, 4, 1, 1, 1, 1]
    assert [each.done.exception() is None for each in jobs] == [number != 5 for number in range(8)]
    await asyncio.wait_for(dispatcher.wait_idle(), TIMEOUT)


async def test_a_request_whose_answer_has_begun_is_not_tried_again():
    dispatcher, channel, peer = await started(BatchLimits(2))
    streaming, other = submit(dispatcher, b"1", b"2")
    frame = await peer.read()
    await peer.write(*wire.encode(wire.Kind.PIECE, frame.batch, [(0, b"", b"one ")]))
    parts = (await asyncio.wait_for(streaming.done, TIMEOUT)).parts()
    peer.close()
    await channel.closed
    dispatcher.retry_lost(channel.sent.popleft(), channel.streaming, WorkerDied("Worker died."))
    assert await anext(parts) == b"one "
    with pytest.raises(WorkerDied):
        await anext(parts)
    _, new_peer = await add_worker(dispatcher)
    frame = await new_peer.read()
    assert [bytes(body) for _, _, body in frame.items] == [b"2"]
    await new_peer.reply(frame)
    assert await answer(other) == b"2"


async def test_a_request_whose_client_is_gone_or_whose_deadline_has_passed_is_not_run():
    dispatcher, _, peer = await started()
    gone, late, fine = job(b"gone"), job(b"late", deadline=time.monotonic() - 1), job(b"fine")
    for each in (gone, late, fine):
        dispatcher.submit(each)
    dispatcher.leave(gone)
    frame = await peer.read()
    assert [bytes(body) for _, _, body in frame.items] == [b"fine"]
    for each in (gone, late):
        with pytest.raises(Unavailable):
            await answer(each)
    await peer.reply(frame)
    assert await answer(fine) == b"fine"


async def test_a_streamed_answer_arrives_in_pieces_and_ends_with_the_reply():
    dispatcher, _, peer = await started()
    [each] = submit(dispatcher, b"x")
    frame = await peer.read()
    await peer.write(*wire.encode(wire.Kind.PIECE, frame.batch, [(0, b"a: b\r\n", b"one ")]))
    first = await asyncio.wait_for(each.done, TIMEOUT)
    assert first.streamed
    assert first.headers == b"a: b\r\n"
    await peer.write(*wire.encode(wire.Kind.PIECE, frame.batch, [(0, b"", b"two ")]))
    await peer.write(*wire.encode(wire.Kind.REPLY, frame.batch, [(200, b"", b"three")]))
    assert [part async for part in first.parts()] == [b"one ", b"two ", b"three"]


class CountingJob(WaitingJob):
    """A job that counts the pieces of its answer."""

    pieces = 0

    def piece(self, headers, body, flow):
        self.pieces += 1
        super().piece(headers, body, flow)


def test_a_turn_of_the_loop_reads_a_few_pieces_of_a_stream_however_many_have_come():
    async def main():
        dispatcher, channel, peer = await started()
        streaming = CountingJob(wire.request_meta("id", b"", []), b"x", time.monotonic(), None, 0)
        dispatcher.submit(streaming)
        frame = await peer.read()
        bodies = [b"%d " % number for number in range(20_000)]
        pieces = [
            b"".join(wire.encode(wire.Kind.PIECE, frame.batch, [(0, b"", body)])) for body in bodies
        ]
        end = wire.encode(wire.Kind.REPLY, frame.batch, [(200, b"", b"end")])
        writing = asyncio.ensure_future(peer.write(*pieces, *end))
        reading = asyncio.ensure_future(read(streaming))
        most = 0
        while not reading.done():
            before = streaming.pieces
            await asyncio.sleep(0)
            most = max(most, streaming.pieces - before)
        assert await reading == [*bodies, b"end"]
        assert 1 < most <= 2 * (PIECES_PER_TURN + 1)  # a read, and a turn for what had come before
        await writing
        assert channel.answered == 1

    async def read(job):
        return [part async for part in (await job.done).parts()]

    asyncio.run(asyncio.wait_for(main(), TIMEOUT))


async def test_parts_that_nobody_waits_for_any_more_are_not_kept():
    dispatcher, _, peer = await started()
    [each] = submit(dispatcher, b"x")
    frame = await peer.read()
    await peer.write(*wire.encode(wire.Kind.PIECE, frame.batch, [(0, b"", b"one ")]))
    first = await asyncio.wait_for(each.done, TIMEOUT)
    each.gone = True
    await peer.write(*wire.encode(wire.Kind.PIECE, frame.batch, [(0, b"", b"two ")]))
    await peer.write(*wire.encode(wire.Kind.REPLY, frame.batch, [(200, b"", b"three")]))
    assert [part async for part in first.parts()] == [b"one ", b"three"]
    await asyncio.wait_for(dispatcher.wait_idle(), TIMEOUT)


async def test_a_stream_that_fails_in_the_middle_ends_with_the_error_and_not_with_its_text():
    dispatcher, _, peer = await started()
    [each] = submit(dispatcher, b"x")
    frame = await peer.read()
    await peer.write(*wire.encode(wire.Kind.PIECE, frame.batch, [(0, b"", b"one ")]))
    await peer.write(*wire.encode(wire.Kind.REPLY, frame.batch, [(503, b"", b"Prediction failed")]))
    parts = (await asyncio.wait_for(each.done, TIMEOUT)).parts()
    assert await anext(parts) == b"one "
    with pytest.raises(PredictionFailed, match="Prediction failed"):
        await anext(parts)


async def test_a_model_that_waits_for_company_sends_when_the_wait_is_over():
    dispatcher, _, peer = await started(BatchLimits(8, wait=0.05))
    jobs = submit(dispatcher, b"a")
    await asyncio.sleep(0)
    jobs += submit(dispatcher, b"b")
    frame = await peer.read()
    assert len(frame.items) == 2
    assert time.monotonic() - jobs[0].arrived >= 0.05


async def test_metric_deltas_are_added_up():
    dispatcher, _, peer = await started()
    delta = {
        "name": "Tokens",
        "type": "counter",
        "unit": "count",
        "value": 2.0,
        "dimensions": {"ModelName": "m"},
    }
    for _ in range(2):
        [each] = submit(dispatcher, b"x")
        await peer.reply(await peer.read(), NOTHING + json.dumps([delta]).encode())
        await answer(each)
    [(key, metric)] = dispatcher.stats.handler_metrics.items()
    assert key == ("Tokens", "counter", "count", (("ModelName", "m"),))
    assert (metric.sum, metric.count, metric.last) == (4.0, 2, 2.0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        b"".join(map(bytes, wire.encode(wire.Kind.REPLY, 77, [(200, b"", b"")]))),
        b"".join(map(bytes, wire.encode(wire.Kind.REPLY, 1, [(200, b"", b""), (200, b"", b"")]))),
        b"".join(map(bytes, wire.encode(wire.Kind.REPLY, 1, [(200, b"", b"")], b"[]"))),
        b"".join(map(bytes, wire.encode(wire.Kind.PIECE, 1, [(9, b"", b"")]))),
        b"".join(map(bytes, wire.encode(wire.Kind.BATCH, 1, []))),
        b"".join(map(bytes, wire.encode(wire.Kind.LOADED, 0, extra=b"not json"))),
    ],
)
async def test_a_worker_that_does_not_keep_to_the_format_is_cut_off(garbage):
    dispatcher, channel, peer = await started()
    submit(dispatcher, b"x")
    await peer.read()
    await peer.write(garbage)
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


# Deadlines, priorities, clients that leave


async def test_a_deadline_is_acted_on_while_every_worker_is_busy():
    dispatcher, _, _ = await busy()
    late, patient = job(deadline=time.monotonic() + 0.03), job()
    for each in (late, patient):
        dispatcher.submit(each)
    with pytest.raises(DeadlinePassed, match="before its deadline") as refused:
        await answer(late)
    assert refused.value.retry_after == 1
    assert not patient.done.done()
    assert list(dispatcher.queue.jobs) == [patient]


async def test_who_is_refused_while_workers_load_is_notified_when_one_will_serve():
    dispatcher = Dispatcher('Model "m" [Version 1.0]', BatchLimits(1), Bounds(1))
    dispatcher.accept(True)
    submit(dispatcher, b"waits")
    for left, reported in (
        (41.2, 42),
        (3.0, 3),
        (None, 1),
    ):  # what was said is not said again when it holds no more
        dispatcher.seconds_until_ready = lambda left=left: left
        [refused] = submit(dispatcher, b"too many")
        with pytest.raises(QueueFull, match=f"try again in {reported} s") as caught:
            await answer(refused)
        assert caught.value.retry_after == reported
    channel, peer = await connect(dispatcher)
    dispatcher.seconds_until_ready = lambda: 1000.0
    dispatcher.add(channel)
    await peer.read()
    submit(dispatcher, b"waits")
    [refused] = submit(dispatcher, b"too many")
    with pytest.raises(QueueFull) as caught:
        await answer(refused)
    assert caught.value.retry_after == 1
    peer.close()


async def test_a_dispatcher_that_is_closed_leaves_no_timer_behind():
    dispatcher, _, peer = await busy()
    dispatcher.submit(job(b"late", time.monotonic() + 600))
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


async def test_all_deadlines_of_a_version_share_one_timer():
    dispatcher, _, _ = await busy()
    set_for = []
    original, dispatcher._set_timer = (
        dispatcher._set_timer,
        lambda at, now: (set_for.append(at), original(at, now)),
    )
    now = time.monotonic()
    jobs = [job(deadline=now + 0.02 + number / 10_000) for number in range(50)]
    for each in jobs:
        dispatcher.submit(each)
        # as at the end of a turn of the loop; in none of these can the timer go off, however
        # long they take
        dispatcher._flush()
    assert set_for == [jobs[0].deadline]
    for each in jobs:
        with pytest.raises(DeadlinePassed):
            await answer(each)


async def test_the_more_urgent_is_served_first():
    dispatcher, _, peer = await started(BatchLimits(1))
    now = time.monotonic()
    submit(dispatcher, b"before")
    frames = [await peer.read()]
    for each in (
        job(b"3"),
        job(b"2", now + 90),
        job(b"1", now + 60),
        job(b"0", priority=1),
        job(b"4", now + 30, -1),
    ):
        dispatcher.submit(each)
    order = []
    for _ in range(5):
        await peer.reply(frames.pop(0))
        frames.append(await peer.read())
        order.append(bytes(frames[-1].items[0][2]))
    assert order == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_request_is_begun_early_enough_for_its_answer_to_be_in_time():
    dispatcher, _, _ = await busy()
    dispatcher.service_rate.add(2, 10.0, 10.0)
    [soon, far] = job(deadline=time.monotonic() + 0.04), job(deadline=time.monotonic() + 60)
    arrived, given = soon.arrived, soon.deadline
    for each in (soon, far):
        dispatcher.submit(each)
    with pytest.raises(DeadlinePassed):
        await answer(soon)
    assert (
        time.monotonic() >= (arrived + given) / 2
    )  # an answer takes 10 s, but half of its time it may hope
    assert far.deadline == pytest.approx(far.arrived + 50, abs=0.1)


async def test_who_leaves_gives_up_its_place_at_once():
    dispatcher, _, _ = await busy(BatchLimits(1), Bounds(2))
    one, two = submit(dispatcher, b"1", b"2")
    dispatcher.leave(one)
    [three] = submit(dispatcher, b"3")
    with pytest.raises(ClientLeft):
        await answer(one)
    assert list(dispatcher.queue.jobs) == [two, three]
    assert dispatcher.stats.refusals == {"ClientLeft": 1}


async def test_a_batch_all_of_whose_clients_have_left_is_not_run_nor_are_suspects():
    dispatcher, channel, peer = await started(BatchLimits(4))
    suspects = submit(dispatcher, b"1", b"2", b"3", b"4")
    await peer.read()
    peer.close()
    await channel.closed
    dispatcher.retry_lost(channel.sent.popleft(), channel.streaming, WorkerDied("Worker died."))
    waiting = submit(dispatcher, b"5")
    for each in (*suspects[2:], *waiting):  # the second half, and all that had not begun
        dispatcher.leave(each)
    for each in (*suspects[2:], *waiting):
        with pytest.raises(ClientLeft):
            await answer(each)
    second, new_peer = await add_worker(dispatcher)
    frame = await new_peer.read()
    assert [bytes(body) for _, _, body in frame.items] == [b"1", b"2"]
    await new_peer.reply(frame)
    await asyncio.wait_for(dispatcher.wait_idle(), TIMEOUT)
    assert not second.sent


async def test_who_leaves_while_its_request_runs_is_counted_once():
    dispatcher, _, peer = await started(BatchLimits(4))
    [leaving, staying] = submit(dispatcher, b"1", b"2")
    frame = await peer.read()
    dispatcher.leave(leaving)
    dispatcher.leave(leaving)
    await peer.reply(frame)
    assert await answer(staying) == b"2"
    await asyncio.wait_for(dispatcher.wait_idle(), TIMEOUT)
    assert (dispatcher.stats.answers, dispatcher.stats.refusals) == ({200: 2}, {})


async def test_nothing_is_sent_early_where_it_would_escape_the_queues_rules():
    dispatcher, channel, peer = await started(BatchLimits(1))
    submit(dispatcher, b"running")
    frame = await peer.read()
    patient, hurried, important = (
        job(b"patient"),
        job(b"hurried", time.monotonic() + 600),
        job(b"important", priority=1),
    )
    for each in (patient, hurried, important):
        dispatcher.submit(each)
    dispatcher._flush()
    assert channel.batches == 1
    order = []
    for _ in range(3):
        await peer.reply(frame)
        frame = await peer.read()
        order.append(bytes(frame.items[0][2]))
    assert order == [b"important", b"hurried", b"patient"]
    dispatcher.service_rate.short = False  # longer batches gain nothing by it
    submit(dispatcher, b"plain")
    dispatcher._flush()
    assert channel.batches == 1


def counts(dispatcher: Dispatcher) -> tuple[int, dict[int, int], dict[str, int]]:
    stats = dispatcher.stats
    return stats.requests, dict(stats.answers), dict(stats.refusals)


def soon() -> float:
    return time.monotonic() + 0.3


@pytest.mark.parametrize("retired", [False, True])
async def test_a_request_that_runs_past_its_deadline_is_refused_then_and_the_others_of_its_batch_answered(
    retired,
):
    dispatcher, channel, peer = await started()
    late, patient = job(b"late", soon()), job(b"patient")
    for each in (late, patient):
        dispatcher.submit(each)
    frame = await peer.read()
    if retired:
        dispatcher.remove(channel)
    with pytest.raises(
        DeadlinePassed, match="did not answer the request before its deadline; try again in 1 s"
    ) as refused:
        await answer(late)
    assert refused.value.retry_after == 1
    assert not patient.done.done()
    assert counts(dispatcher) == (2, {}, {"AnswerLate": 1})
    assert dispatcher.in_flight == 2  # the worker is not done with it
    await peer.reply(frame)
    assert await answer(patient) == b"patient"
    assert counts(dispatcher) == (2, {200: 1}, {"AnswerLate": 1})
    assert (dispatcher.in_flight, dispatcher._due) == (0, {})
    await asyncio.wait_for(dispatcher.wait_idle(), TIMEOUT)


async def test_a_batch_for_which_no_client_waits_any_more_is_called_off():
    dispatcher, _, peer = await started()
    late, leaving = job(b"late", soon()), job(b"leaving")
    for each in (late, leaving):
        dispatcher.submit(each)
    frame = await peer.read()
    with pytest.raises(DeadlinePassed):
        await answer(late)
    dispatcher.leave(leaving)
    called_off = await peer.read()
    assert (called_off.kind, called_off.batch) == (wire.Kind.CANCEL, frame.batch)
    await peer.reply(frame)
    assert (await answer(leaving), counts(dispatcher)) == (
        b"leaving",
        (2, {200: 1}, {"AnswerLate": 1}),
    )
    dispatcher.submit(alone := job(b"alone", soon()))
    frame = await peer.read()
    with pytest.raises(DeadlinePassed):
        await answer(alone)
    assert (await peer.read()).kind is wire.Kind.CANCEL
    before = dispatcher.stats.busy_seconds
    await peer.reply(frame)
    await asyncio.wait_for(dispatcher.wait_idle(), TIMEOUT)
    assert counts(dispatcher) == (3, {200: 1}, {"AnswerLate": 2})
    assert dispatcher.stats.busy_seconds > before  # the worker was, and the pace is learned from it
    assert dispatcher.service_rate.answer_time > 0


async def test_an_answer_that_has_begun_to_stream_is_not_broken_off_at_the_deadline():
    dispatcher, _, peer = await started()
    begun, late = job(b"begun", now := soon()), job(b"late", now)
    for each in (begun, late):
        dispatcher.submit(each)
    frame = await peer.read()
    await peer.write(*wire.encode(wire.Kind.PIECE, frame.batch, [(0, b"", b"one ")]))
    first = await asyncio.wait_for(begun.done, TIMEOUT)
    with pytest.raises(DeadlinePassed):
        await answer(late)
    await peer.write(*wire.encode(wire.Kind.PIECE, frame.batch, [(1, b"", b"to nobody")]))
    await peer.write(
        *wire.encode(wire.Kind.REPLY, frame.batch, [(200, b"", b"two"), (200, b"", b"to nobody")])
    )
    assert [part async for part in first.parts()] == [b"one ", b"two"]
    assert counts(dispatcher) == (2, {200: 1}, {"AnswerLate": 1})


@pytest.mark.parametrize(
    "dies",
    [
        "before the deadline",
        "after the deadline",
        "and its requests wait again before the deadline",
    ],
)
@pytest.mark.parametrize("end", ["retry_lost", "requeue"])
async def test_a_worker_that_dies_with_a_late_request_loses_and_doubles_nothing(dies, end):
    dispatcher, channel, peer = await started()
    late, first, second = job(b"late", soon()), job(b"first"), job(b"second")
    for each in (late, first, second):
        dispatcher.submit(each)
    await peer.read()
    if dies != "after the deadline":
        peer.close()
        await channel.closed
    if dies.startswith("and"):
        getattr(dispatcher, end)(
            channel.sent.popleft(), channel.streaming, WorkerDied("Worker died.")
        )
    with pytest.raises(
        AnswerLate, match="did not answer the request before its deadline"
    ):  # it may have had an effect
        await answer(late)
    if dies == "after the deadline":
        peer.close()
        await channel.closed
    if not dies.startswith("and"):
        getattr(dispatcher, end)(
            channel.sent.popleft(), channel.streaming, WorkerDied("Worker died.")
        )
    _, peer = await add_worker(dispatcher)
    seen = []
    while not (first.done.done() and second.done.done()):
        frame = await peer.read()
        seen += [bytes(body) for _, _, body in frame.items]
        await peer.reply(frame)
        await asyncio.wait(
            [first.done, second.done], timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED
        )
    assert seen == [b"first", b"second"]
    await asyncio.wait_for(dispatcher.wait_idle(), TIMEOUT)
    assert counts(dispatcher) == (3, {200: 2}, {"AnswerLate": 1})
    assert not dispatcher._due
    assert not dispatcher._begun


# Overload


async def test_bytes_that_wait_are_bounded_and_one_request_alone_may_exceed_the_bound():
    dispatcher, _, _ = await busy(BatchLimits(1), Bounds(10, 100))
    [large] = submit(dispatcher, bytes(200))
    [refused] = submit(dispatcher, b"x")
    with pytest.raises(QueueFull, match=r"requests with 200 bytes wait \(maxQueueBytes\)"):
        await answer(refused)
    dispatcher.leave(large)
    submit(dispatcher, bytes(60), bytes(40))
    [refused] = submit(dispatcher, b"x")
    with pytest.raises(QueueFull):
        await answer(refused)
    assert dispatcher.queue.size == 100
    submit(dispatcher, *[b""] * 8)
    [refused] = submit(dispatcher, b"")
    with pytest.raises(
        QueueFull, match="10 requests wait"
    ):  # the words are those of this refusal, not of the last one
        await answer(refused)


async def test_a_refusal_says_when_to_come_again_by_what_workers_were_measured_to_do():
    dispatcher, _, _ = await busy(BatchLimits(2), Bounds(6, overload_status=429))
    dispatcher.service_rate.add(2, 1.0, 1.0)  # 2 requests a second of one worker: 6 take 3 seconds
    [*_, refused] = submit(dispatcher, *[b"x"] * 7)
    with pytest.raises(
        QueueFull, match=r"6 requests wait \(jobQueueSize\); try again in 3 s"
    ) as caught:
        await answer(refused)
    assert (caught.value.status, caught.value.type, caught.value.retry_after) == (
        429,
        "TooManyRequestsException",
        3,
    )


async def test_limits_and_bounds_change_while_requests_wait():
    dispatcher, _, peer = await started(BatchLimits(8, wait=60.0), Bounds(2))
    submit(dispatcher, b"1", b"2")
    [refused] = submit(dispatcher, b"3")
    with pytest.raises(QueueFull):
        await answer(refused)
    dispatcher.change(BatchLimits(1), Bounds(5))
    assert len((await peer.read()).items) == 1
    submit(dispatcher, *[b"x"] * 4)
    assert len(dispatcher.queue) == 5


async def test_the_pace_is_measured_from_reply_to_reply():
    dispatcher, channel, peer = await busy(BatchLimits(2))
    for sent in list(channel.sent):
        items = [(200, b"", b"")] * len(sent.jobs)
        await peer.write(*wire.encode(wire.Kind.REPLY, sent.batch, items))
        await answer(sent.jobs[-1])
    assert dispatcher.service_rate.rate > 0
    assert 0 < dispatcher.service_rate.answer_time < TIMEOUT


async def test_in_a_full_queue_the_least_urgent_gives_way_to_a_greater_priority():
    dispatcher, _, _ = await busy(BatchLimits(1), Bounds(3))
    low, plain, later = job(priority=-1), job(), job()
    for each in (low, plain, later):
        dispatcher.submit(each)
    [refused] = submit(dispatcher, b"x")
    with pytest.raises(QueueFull):  # in place of `low`, whose priority is less
        await answer(low)
    assert not refused.done.done()
    important = job(priority=5)
    dispatcher.submit(important)
    with pytest.raises(QueueFull):  # the last to come of those that are left
        await answer(refused)
    assert list(dispatcher.queue.jobs) == [important, plain, later]
    [equal] = submit(dispatcher, b"x")
    with pytest.raises(QueueFull):
        await answer(equal)
    assert dispatcher.queue.size == 3


async def test_who_left_while_its_batch_was_with_a_worker_that_died_is_not_run():
    dispatcher, channel, peer = await started(BatchLimits(1))
    [begun] = submit(dispatcher, b"1")
    await peer.read()
    [early] = submit(dispatcher, b"2")
    await peer.read()
    dispatcher.leave(begun)
    dispatcher.leave(early)
    await asyncio.sleep(0)
    submit(dispatcher, b"3")  # a flush that looks for who has left, and finds nobody in the queue
    await asyncio.sleep(0)
    peer.close()
    await channel.closed
    dispatcher.retry_lost(channel.sent.popleft(), channel.streaming, WorkerDied("Worker died."))
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
    await second.reply(await second.read())
    assert await answer(waiting) == b"1"


async def test_an_aborted_channel_gets_nothing_more():
    dispatcher, channel, _ = await started()
    channel.abort()
    [waiting] = submit(dispatcher, b"1")
    _, second = await add_worker(dispatcher)
    await second.reply(await second.read())
    assert await answer(waiting) == b"1"


def test_a_request_is_answered_with_the_times_of_its_batch():
    """The queue ends where a worker is free, and what the worker says of its steps is taken
    over.
    """

    class Curious(WaitingJob):
        __slots__ = ("batch",)

        def answer(self, status, headers, body, batch):
            self.batch = batch
            super().answer(status, headers, body, batch)

    async def main():
        nonlocal dispatcher
        dispatcher, _, peer = await started(BatchLimits(2))
        first = Curious(wire.request_meta("first", b"", []), b"", time.monotonic())
        dispatcher.submit(first)
        frame = await peer.read()
        behind = [
            Curious(wire.request_meta("behind", b"", []), b"", time.monotonic()) for _ in range(2)
        ]
        for each in behind:
            dispatcher.submit(each)
        early = await peer.read()  # the only worker may hold one more full batch
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
        assert pair.free == pair.sent  # nobody else could have had it sooner
        assert pair.began == pair.sent  # it cannot have been at it for longer
        assert pair.preprocess == pair.answered - pair.sent
        assert math.isnan(pair.inference)
        parts = pair.seconds(behind[0].arrived)
        assert [*parts] == ["queue", "batch", "preprocess", "other", "total"]
        assert sum(parts.values()) == pytest.approx(2 * parts["total"])
        stats = dispatcher.stats
        assert [each.count for each in (stats.latency, stats.queue, stats.batch_wait)] == [3, 3, 3]
        assert [each.count for each in (stats.preprocess, stats.inference, stats.postprocess)] == [
            1,
            1,
            0,
        ]
        assert stats.recent.find(b"behind").times.seconds(behind[0].arrived) == parts
        assert stats.recent.find(b"nobody") is None

    dispatcher = None
    asyncio.run(main())


async def test_what_is_refused_is_an_error_unless_its_client_left():
    dispatcher, _, peer = await started(BatchLimits(1), bounds=Bounds(1))
    [failed] = submit(dispatcher, b"1")
    frame = await peer.read()
    submit(dispatcher, b"2")
    await peer.read()
    [waits] = submit(dispatcher, b"3")
    [refused] = submit(dispatcher, b"4")
    with pytest.raises(QueueFull):
        await answer(refused)
    assert dispatcher.stats.errors == 1
    dispatcher.leave(waits)
    with pytest.raises(ClientLeft):
        await answer(waits)
    await peer.write(*wire.encode(wire.Kind.REPLY, frame.batch, [(500, b"", b"")]))
    await answer(failed)
    assert dispatcher.stats.errors == 2
    assert [seen.error or seen.status for seen in dispatcher.stats.recent.newest()] == [
        500,
        "ClientLeft",
        "QueueFull",
    ]


async def test_a_worker_that_reports_more_than_any_worker_does_is_ended() -> None:
    _, channel, peer = await started(BatchLimits(1))
    await peer.write(
        *wire.encode(wire.Kind.REPORT, 0, extra=b'{"lost": "' + b"x" * MOST_FACTS + b'"}')
    )
    await asyncio.wait_for(channel.closed, TIMEOUT)


def test_a_connection_that_is_closed_is_not_asked_for_a_sign_of_life():
    """asyncio's own transports raise TypeError there, from Python 3.12 on."""

    async def ask():
        ours, theirs = socket.socketpair()
        with theirs:
            channel = Channel(None)
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                asyncio.Protocol, ours
            )
            channel._transport, written = transport, []
            transport.writelines = written.extend
            channel.ping()
            transport.close()
            channel.ping()
            return written

    assert len(asyncio.run(ask())) == len(wire.encode(wire.Kind.PING, 0))
