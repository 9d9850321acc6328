"""Waits for events that end with the event, a time or a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from tsx_runtime.core.concurrency.events import wait_for_event

pytestmark = pytest.mark.anyio


async def test_a_wait_ends_with_its_event_or_its_time() -> None:
    event = asyncio.Event()
    await wait_for_event(event, 0)
    assert not event.is_set()
    event.set()
    await asyncio.wait_for(wait_for_event(event, 1000), 60)


async def test_a_wait_that_is_cancelled_in_the_turn_of_its_event_is_cancelled() -> None:
    event = asyncio.Event()
    waiting = asyncio.ensure_future(wait_for_event(event, 1000))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    event.set()
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
