"""Connections with much to do share the turns of the event loop."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from tsx_runtime.http.turns import MAX_CALLBACKS_PER_TURN, Turns

pytestmark = pytest.mark.anyio
name: ContextVar[str] = ContextVar("name", default="nobody")


async def test_a_turn_of_the_loop_runs_a_few_callbacks_in_order_and_in_their_contexts():
    name.set("caller")
    turns, ran, names = Turns(asyncio.get_running_loop()), list[int](), set[str]()

    def work(number: int) -> None:
        ran.append(number)
        names.add(name.get())
        name.set(str(number))
        if number < 10:
            turns.call_soon(lambda: work(number + 10))

    for number in range(10):
        turns.call_soon(lambda number=number: work(number))
    while len(ran) < 20:
        before = len(ran)
        await asyncio.sleep(0)
        assert len(ran) - before <= MAX_CALLBACKS_PER_TURN
    assert ran == list(range(20))
    assert names == {"nobody"}


async def test_a_callback_that_fails_does_not_keep_the_others_from_their_turn():
    loop, failed = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
    turns, done = Turns(loop), asyncio.Event()
    turns.call_soon(lambda: [][0])
    turns.call_soon(done.set)
    await asyncio.wait_for(done.wait(), 10)
    assert len(failed) == 1
