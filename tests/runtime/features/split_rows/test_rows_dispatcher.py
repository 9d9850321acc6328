"""The dispatcher that splits requests into chunks of rows; each request still counts as one."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest

from tests.kit.jobs import a_waiting_job, refusal_of
from tests.kit.peers import Peer, add_worker, counts, submit, wait_idle
from tsx_runtime import wire
from tsx_runtime.core.scheduling.dispatcher import Bounds
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.errors import (
    AnswerLate,
    ClientLeft,
    DeadlinePassed,
    NoWorker,
    PayloadTooLarge,
    PredictionFailed,
    QueueFull,
    TsxError,
    WorkerDied,
)
from tsx_runtime.features.split_rows.dispatcher import RowsDispatcher
from tsx_runtime.worker.codecs.json_text import to_json

pytestmark = pytest.mark.anyio


def write_body(key: str, values: list[int]) -> bytes:
    return to_json(
        {key: [{"name": "x", "datatype": "INT64", "shape": [len(values), 1], "data": values}]}
    ).encode()


def a_job(rows: int = 6, seconds: float | None = None, priority: int = 0) -> WaitingJob:
    meta = wire.request_meta(
        "id", b"", [(b"explain", b"False"), wire.V2_HEADER, (b"x-tsx-cost", b"7")]
    )
    deadline = None if seconds is None else time.monotonic() + seconds
    return a_waiting_job(write_body("inputs", [*range(rows)]), deadline, priority, meta)


def read_values(item: wire.Item) -> list[int]:
    return list(json.loads(bytes(item[2]))["inputs"][0]["data"])


async def reply(peer: Peer, frame: wire.Frame, *errors: wire.Item) -> None:
    """Double the values of a batch's items, but answer the last items with `errors`."""
    items = [
        (200, wire.JSON_HEADER, write_body("outputs", [2 * value for value in read_values(item)]))
        for item in frame.items
    ]
    await peer.answer(frame, *items[: len(items) - len(errors)], *errors)


@asynccontextmanager
async def serve_rows(workers: int = 1, max_bytes: int = 10_000):
    """Serve with chunks of two rows and batches of two chunks; check that no state remains."""
    dispatcher = RowsDispatcher('Model "m" [Version 1.0]', BatchLimits(2), Bounds(10), 2, max_bytes)
    dispatcher.accept(True)
    yield dispatcher, *[(await add_worker(dispatcher))[1] for _ in range(workers)]
    await wait_idle(dispatcher)
    assert dispatcher.in_flight == 0
    assert not dispatcher._requests
    assert not dispatcher._deadlines
    assert not dispatcher._restarted


async def test_chunks_run_on_several_workers_but_count_as_one_request():
    async with serve_rows(workers=2) as (dispatcher, peer, second_peer):
        job = a_job(7)
        dispatcher.submit(job)
        assert dispatcher.stats.requests == 1
        first, second = await peer.read(), await second_peer.read()
        assert [read_values(item) for item in (*first.items, *second.items)] == [
            [0, 1],
            [2, 3],
            [4, 5],
            [6],
        ]
        assert b"x-tsx-cost: 2\r\n" in first.items[0][1]
        await reply(second_peer, second)
        await reply(peer, first)
        answer = await job.done
        assert answer.body == write_body("outputs", [2 * value for value in range(7)])
        assert (answer.status, answer.headers) == (200, wire.JSON_HEADER)
        stats = dispatcher.stats
        assert (stats.requests, stats.answers, stats.latency.count, stats.refusals) == (
            1,
            {200: 1},
            1,
            {},
        )
        assert [record.status for record in stats.recent.newest()] == [200]


async def test_a_request_with_few_rows_is_not_split():
    async with serve_rows() as (dispatcher, peer):
        job = a_job(2)
        dispatcher.submit(job)
        frame = await peer.read()
        assert frame.items[0][1:] == (job.meta, job.body)
        await reply(peer, frame)
        await job.done


async def test_the_first_error_is_the_answer_and_waiting_chunks_are_dropped():
    async with serve_rows() as (dispatcher, peer):
        job, next_job = a_job(12), a_job(1)
        dispatcher.submit(job)
        frame = await peer.read()
        dispatcher.submit(next_job)
        await reply(peer, frame, (507, b"x-why: 1\r\n", b"too much"), (500, b"", b"as well"))
        answer = await job.done
        assert (answer.status, answer.headers, answer.body) == (507, b"x-why: 1\r\n", b"too much")
        # The batch had been sent before the error came.
        frame, cancelled = await peer.read(), await peer.read()
        assert (len(frame.items), cancelled.kind) == (2, wire.Kind.CANCEL)
        await reply(peer, frame)
        frame = await peer.read()
        assert [read_values(item) for item in frame.items] == [[0]]
        await reply(peer, frame)
        await next_job.done
        assert counts(dispatcher) == (
            2,
            {507: 1, 200: 1},
            {},
        )


def check_refusal(job: WaitingJob, error: type[TsxError], match: str) -> None:
    with pytest.raises(error, match=match):
        job.done.result()


async def test_either_all_chunks_are_accepted_or_none():
    async with serve_rows() as (dispatcher, peer):
        first, second, urgent_job, huge_job = a_job(6), a_job(16), a_job(16, priority=1), a_job(50)
        dispatcher.submit(first)
        frame = await peer.read()
        dispatcher.submit(huge_job)
        check_refusal(
            huge_job,
            PayloadTooLarge,
            "50 rows, in 25 parts of 2 .splitRows., and the queue holds 10",
        )
        waiting_jobs = [a_job(1) for _ in range(5)]
        submit(dispatcher, *waiting_jobs)
        dispatcher.submit(second)
        check_refusal(second, QueueFull, "8 parts .* try again in 1 s")
        assert dispatcher.stats.requests == 6
        # The urgent request displaces other requests.
        dispatcher.submit(urgent_job)
        for job in waiting_jobs[1:]:
            check_refusal(job, QueueFull, "The queue is full")
        accepted = [first, waiting_jobs[0], urgent_job]
        while not all(job.done.done() for job in accepted):
            await reply(peer, frame)
            await asyncio.wait(
                [job.done for job in accepted], timeout=0.01, return_when=asyncio.FIRST_COMPLETED
            )
            if dispatcher.in_flight:
                frame = await peer.read()
        assert [job.done.result().status for job in accepted] == [200] * 3
        assert dispatcher.stats.refusals["QueueFull"] == 5
        assert dispatcher.stats.refusals["PayloadTooLarge"] == 1


async def test_all_chunks_leave_the_queue_with_their_client():
    async with serve_rows() as (dispatcher, peer):
        job = a_job(12)
        dispatcher.submit(job)
        frame = await peer.read()
        dispatcher.leave(job)
        check_refusal(job, ClientLeft, "disconnected")
        cancelled = await peer.read()
        assert cancelled.kind is wire.Kind.CANCEL
        await asyncio.sleep(0)  # The queue drops the waiting chunks in the next iteration.
        assert dispatcher.pending == 0
        await reply(peer, frame)
        await dispatcher.wait_idle()
        assert counts(dispatcher) == (
            1,
            {},
            {"ClientLeft": 1},
        )


@pytest.mark.parametrize(("rows", "error"), [(4, AnswerLate), (12, DeadlinePassed)])
async def test_all_chunks_share_one_deadline(rows, error):
    async with serve_rows() as (dispatcher, peer):
        job = a_job(rows, seconds=0.05)
        dispatcher.submit(job)
        frame = await peer.read()
        await refusal_of(job, error)
        while frame.kind is not wire.Kind.BATCH:
            frame = await peer.read()
        await reply(peer, frame)
        await dispatcher.wait_idle()
        assert (
            dispatcher.stats.requests,
            dispatcher.stats.answers,
            sum(dispatcher.stats.refusals.values()),
        ) == (1, {}, 1)


async def test_a_request_without_a_worker_is_refused_once():
    async with serve_rows() as (dispatcher, peer):
        dispatcher.accept(False)
        job = a_job()
        dispatcher.submit(job)
        check_refusal(job, NoWorker, "no worker")
        dispatcher.accept(True)
        job = a_job(12)
        dispatcher.submit(job)
        frame = await peer.read()
        dispatcher.refuse_waiting(NoWorker("gone"))
        check_refusal(job, NoWorker, "gone")
        await reply(peer, frame)
        await dispatcher.wait_idle()
        assert (dispatcher.stats.requests, dispatcher.stats.refusals) == (1, {"NoWorker": 2})


async def test_chunks_of_a_dead_worker_are_retried():
    async with serve_rows(workers=2) as (dispatcher, peer, second_peer):
        job = a_job(4)
        dispatcher.submit(job)
        await peer.read()
        channel = next(candidate for candidate in dispatcher.channels if candidate.sent)
        peer.close()
        await channel.closed
        dispatcher.retry_lost(channel.sent[0], (), WorkerDied("died"))
        for _ in range(2):
            await reply(second_peer, await second_peer.read())
        assert (await job.done).body == write_body("outputs", [0, 2, 4, 6])
        assert dispatcher.stats.answers == {200: 1}


@pytest.mark.parametrize("workers", [1, 2])
async def test_chunks_that_fail_after_a_worker_death_leave_no_state(workers):
    async with serve_rows(workers) as (dispatcher, first_peer, *peers):
        job = a_job(4)
        dispatcher.submit(job)
        await first_peer.read()
        channel = next(candidate for candidate in dispatcher.channels if candidate.sent)
        first_peer.close()
        await channel.closed
        dispatcher.retry_lost(channel.sent.popleft(), (), WorkerDied("died"))
        for peer in peers:
            await reply(peer, await peer.read(), (400, b"", b"bad"))
            assert (await job.done).status == 400
            await reply(peer, await peer.read())
        dispatcher.leave(job)
        await asyncio.wait([job.done])
        job.done.exception()
        await dispatcher.wait_idle()


async def test_answers_with_other_success_statuses_are_joined():
    async with serve_rows() as (dispatcher, peer):
        job = a_job(4)
        dispatcher.submit(job)
        frame = await peer.read()
        answers = [
            (
                201,
                wire.JSON_HEADER,
                write_body("outputs", [2 * value for value in read_values(item)]),
            )
            for item in frame.items
        ]
        await reply(peer, frame, *answers)
        answer = await job.done
        assert (answer.status, answer.body) == (201, write_body("outputs", [0, 2, 4, 6]))
        assert dispatcher.stats.answers == {201: 1}


async def test_answers_that_cannot_be_joined_give_an_error_with_the_reason():
    async with serve_rows() as (dispatcher, peer):
        job = a_job(4)
        dispatcher.submit(job)
        frame = await peer.read()
        await reply(peer, frame, (200, b"", b"text"))
        await refusal_of(job, PredictionFailed, "cannot be joined.*Remove splitRows")
        assert counts(dispatcher) == (1, {}, {"PredictionFailed": 1})


@pytest.mark.parametrize(
    ("result_size", "error"),
    [(0, None), (1, "has 194 bytes or more, but max_response_size is 193. Raise it")],
)
async def test_a_joined_answer_has_the_same_size_limit(result_size, error):
    size = len(write_body("outputs", [0, 2, 4, 6]))
    async with serve_rows(max_bytes=size - result_size) as (dispatcher, peer):
        job = a_job(4)
        dispatcher.submit(job)
        await reply(peer, await peer.read())
        await asyncio.wait([job.done])
        if error is None:
            assert len(job.done.result().body) == size
        else:
            check_refusal(job, PredictionFailed, error)
            await dispatcher.wait_idle()
            assert counts(dispatcher) == (1, {}, {"PredictionFailed": 1})


async def test_too_large_chunk_answers_are_refused_before_the_last_one(monkeypatch):
    monkeypatch.setattr("tsx_runtime.features.split_rows.dispatcher.MAX_JSON_BYTES", 0)

    async with serve_rows(max_bytes=100) as (dispatcher, peer):
        job = a_job(6)
        dispatcher.submit(job)
        frame = await peer.read()
        await reply(peer, frame, (200, b"", b"x" * 101), (200, b"", b""))
        await refusal_of(job, PredictionFailed, "max_response_size is 100")
        # The last chunk had already been sent.
        assert (await peer.read()).kind is wire.Kind.BATCH
        await reply(peer, frame._replace(batch=frame.batch + 1, items=frame.items[:1]))
        await dispatcher.wait_idle()


async def test_a_streamed_chunk_answer_is_an_error():
    async with serve_rows() as (dispatcher, peer):
        job = a_job(4)
        dispatcher.submit(job)
        frame = await peer.read()
        await peer.stream(frame, b"a piece")
        await refusal_of(job, PredictionFailed, "Remove splitRows")
        await reply(peer, frame)
        await dispatcher.wait_idle()
        assert (dispatcher.stats.requests, dispatcher.stats.answers) == (1, {})
