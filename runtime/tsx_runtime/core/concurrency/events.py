"""Waiting for events."""

from __future__ import annotations

import asyncio


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, for at most `seconds`.

    Before Python 3.12 `asyncio.wait_for` loses a cancellation that arrives in the event-loop
    iteration in which the event is set.
    """
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiter], timeout=seconds)
    finally:
        waiter.cancel()
