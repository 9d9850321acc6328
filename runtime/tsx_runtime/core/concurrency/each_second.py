"""Calls that are made once a second while a server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def each_second(*calls: Callable[[], None]) -> AsyncIterator[None]:
    """After a second that the loop had no time for, the next call is later."""

    async def call_for_ever() -> None:
        while True:
            await asyncio.sleep(1)
            for call in calls:
                call()

    task = asyncio.create_task(call_for_ever())
    try:
        yield
    finally:
        task.cancel()
