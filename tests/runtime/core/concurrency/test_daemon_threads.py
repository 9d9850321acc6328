"""Calls in daemon threads: their number is limited, and a call may hang."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.errors import Unavailable

pytestmark = pytest.mark.anyio


def raise_error(error: BaseException) -> object:
    raise error


async def test_a_call_returns_or_raises_what_its_function_does() -> None:
    threads = DaemonThreads(1, "calls")
    assert await threads.call(threading.get_ident) != threading.get_ident()
    with pytest.raises(KeyError):
        await threads.call(lambda: raise_error(KeyError("x")))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.call(lambda: raise_error(StopIteration()))


async def test_calls_beyond_the_limit_are_refused_until_one_has_ended() -> None:
    threads, gate = DaemonThreads(2, "downloads"), threading.Event()
    calls = [asyncio.create_task(threads.call(gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="2 downloads are running"):
        await threads.call(int)
    gate.set()
    assert await asyncio.gather(*calls) == [True, True]
    assert await threads.call(int) == 0


def test_the_end_of_the_loop_does_not_wait_for_a_hanging_call() -> None:
    gate = threading.Event()

    async def main() -> None:
        threads = DaemonThreads(1, "calls")
        with pytest.raises((TimeoutError, asyncio.TimeoutError)):
            await asyncio.wait_for(threads.call(gate.wait), 0.01)

    asyncio.run(main())
    gate.set()
