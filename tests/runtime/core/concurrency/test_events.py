"""Waiting for an event ends with the event, a timeout or a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from tsx_runtime.core.concurrency.events import wait_for_event

pytestmark = pytest.mark.anyio


async def test_a_wait_ends_with_its_event_or_its_timeout() -> None:
    event = asyncio.Event()
    await wait_for_event(event, 0)
    assert not event.is_set()
    event.set()
    await asyncio.wait_for(wait_for_event(event, 1000), 60)


async def test_a_wait_cancelled_in_the_same_iteration_as_its_event_is_cancelled() -> None:
    event = asyncio.Event()
    waiter = asyncio.ensure_future(wait_for_event(event, 1000))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    event.set()
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
