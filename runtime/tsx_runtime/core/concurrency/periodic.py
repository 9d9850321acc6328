"""Work that goes on beside a server's requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial

logger = logging.getLogger("tsx.server")


async def repeat(seconds: float, work: Callable[[], Awaitable[None] | None]) -> None:
    """After a pause that the loop had no time to end, the next call is later."""
    while True:
        await asyncio.sleep(seconds)
        if (waiting := work()) is not None:
            await waiting


@asynccontextmanager
async def running(what: str, *works: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """While this is open.

    None of them should end by an error; where one does, the log says what will be missing.
    """
    tasks = [asyncio.create_task(work) for work in works]
    for task in tasks:
        task.add_done_callback(partial(_log_failure, what))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(what: str, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s until the server is restarted", what, exc_info=error)
