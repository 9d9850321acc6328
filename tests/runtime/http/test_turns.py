"""Busy connections share the iterations of the event loop."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from tsx_runtime.http.turns import MAX_CALLBACKS_PER_TURN, Turns

pytestmark = pytest.mark.anyio
name: ContextVar[str] = ContextVar("name", default="nobody")


async def test_one_loop_iteration_runs_few_callbacks_in_order_and_context():
    name.set("caller")
    turns, executed, names = Turns(asyncio.get_running_loop()), list[int](), set[str]()

    def record_run(number: int) -> None:
        executed.append(number)
        names.add(name.get())
        name.set(str(number))
        if number < 10:
            turns.call_soon(lambda: record_run(number + 10))

    for number in range(10):
        turns.call_soon(lambda number=number: record_run(number))
    while len(executed) < 20:
        count_before = len(executed)
        await asyncio.sleep(0)
        assert len(executed) - count_before <= MAX_CALLBACKS_PER_TURN
    assert executed == list(range(20))
    assert names == {"nobody"}


async def test_a_failing_callback_does_not_stop_the_others():
    loop, failures = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    turns, all_done = Turns(loop), asyncio.Event()
    turns.call_soon(lambda: [][0])
    turns.call_soon(all_done.set)
    await asyncio.wait_for(all_done.wait(), 10)
    assert len(failures) == 1
