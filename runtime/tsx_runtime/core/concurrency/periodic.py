"""Background tasks of a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial

logger = logging.getLogger("tsx.server")


async def repeat(seconds: float, work: Callable[[], Awaitable[None] | None]) -> None:
    """Call `work` forever, with a pause of `seconds` after each call."""
    while True:
        await asyncio.sleep(seconds)
        if (result := work()) is not None:
            await result


@asynccontextmanager
async def running(failure: str, *coroutines: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run coroutines in the background while the context is open.

    They should never fail. If one does, the log says "FAILURE until the server is restarted".
    """
    tasks = [asyncio.create_task(work) for work in coroutines]
    for task in tasks:
        task.add_done_callback(partial(_log_failure, failure))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(failure: str, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s until the server is restarted", failure, exc_info=error)
