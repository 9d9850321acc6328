"""The dispatcher of stateful models; `test_sequences.py` tests its decisions."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit.jobs import TIMEOUT, a_waiting_job, refusal_of
from tests.kit.peers import (
    answer,
    counts,
    serve,
    soon,
    submit,
)
from tsx_runtime import wire
from tsx_runtime.core.scheduling.dispatcher import Bounds
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.core.scheduling.strategies import SequenceConfig
from tsx_runtime.errors import DeadlinePassed
from tsx_runtime.features.sequences.dispatcher import SequenceDispatcher

pytestmark = pytest.mark.anyio


async def start_dispatcher():
    return await serve(
        SequenceDispatcher(
            'Model "m" [Version 1.0]',
            BatchLimits(4),
            Bounds(),
            SequenceConfig(60.0, max_sequences=4),
        )
    )


async def test_a_sequence_named_by_the_server_is_forgotten_after_its_answer():
    dispatcher, _, peer = await start_dispatcher()
    jobs = submit(dispatcher, b"a", b"b")
    await peer.serve()
    assert [await answer(job) for job in jobs] == [b"a", b"b"]
    assert b"ts_request_sequence_id: ts-seq-" in (await jobs[0].done).headers
    assert not dispatcher._generated


async def test_a_retiring_process_ends_when_its_worker_is_removed():
    dispatcher, channel, peer = await start_dispatcher()
    first = a_waiting_job(b"a")
    first.meta += wire.header_block(
        [(b"ts_request_sequence_id", b"a"), (b"ts_request_sequence_start", b"true")]
    )
    dispatcher.submit(first)
    await peer.serve()
    assert await answer(first) == b"a"
    retiring = asyncio.create_task(dispatcher.release(channel))
    await asyncio.sleep(0)
    assert not retiring.done()
    dispatcher.remove(channel)
    await asyncio.wait_for(retiring, TIMEOUT)


async def test_a_sequence_continues_only_after_its_late_request_has_ended():
    dispatcher, channel, peer = await start_dispatcher()
    late_job, next_job = a_waiting_job(b"late", soon()), a_waiting_job(b"following")
    for job in (late_job, next_job):
        job.meta += wire.header_block([(b"ts_request_sequence_id", b"a")])
    dispatcher.submit(late_job)
    frame = await peer.read()
    dispatcher.submit(next_job)
    await refusal_of(late_job, DeadlinePassed, "did not answer")
    assert (await peer.read()).kind is wire.Kind.CANCEL
    dispatcher._flush()
    assert (channel.batches, dispatcher.pending) == (1, 1)
    await peer.reply(frame)
    await peer.serve()
    assert await answer(next_job) == b"following"
    assert counts(dispatcher) == (2, {200: 1}, {"AnswerLate": 1})
    assert not dispatcher._deadlines
