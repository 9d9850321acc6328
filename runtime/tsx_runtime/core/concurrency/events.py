"""Waiting for events."""

from __future__ import annotations

import asyncio


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, for at most so many seconds.

    Before Python 3.12 `asyncio.wait_for` loses a cancellation that comes in the turn in which the
    event is set.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=seconds)
    finally:
        waiting.cancel()
