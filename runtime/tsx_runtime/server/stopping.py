"""The events that stop a server, and the waits for them."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tsx_archiver import ArchiveError
from tsx_runtime.core.concurrency.events import wait_for_event
from tsx_runtime.errors import TsxError

logger = logging.getLogger("tsx.server")

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class StopEvents:
    """The events that stop a server; signals or another thread set them.

    Another thread must call `loop.call_soon_threadsafe(events.stop_requested.set)`.
    """

    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    stop_now: asyncio.Event = field(default_factory=asyncio.Event)  # set by a second Ctrl-C
    # set if another server has taken over the addresses
    replaced: asyncio.Event = field(default_factory=asyncio.Event)

    def handle_signals(self) -> None:
        """Let the first signal request a stop, and a second Ctrl-C an immediate stop."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if self.stop_requested.is_set() and number == signal.SIGINT:
                self.stop_now.set()
            self.stop_requested.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            if sys.platform == "win32":
                signal.signal(
                    number, lambda number, _: loop.call_soon_threadsafe(on_signal, number)
                )
            else:
                loop.add_signal_handler(number, on_signal, number)

    async def run_until_stop(self, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
        """Return the result of `work`, or None if the stop comes first."""
        task = asyncio.create_task(work)
        stop_task = asyncio.create_task(self.stop_requested.wait())
        await asyncio.wait([task, stop_task], return_when=asyncio.FIRST_COMPLETED)
        stop_task.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        return None

    async def wait(self, loading: Coroutine[Any, Any, None] | None) -> BaseException | None:
        """Wait for a stop, or return the error of a model that could not be loaded."""
        try:
            if loading is not None:
                await self.run_until_stop(loading)
            await self.stop_requested.wait()
        except (TsxError, ArchiveError) as error:
            return error
        return None

    async def delay_stop(self, seconds: float) -> None:
        """Continue to accept requests until load balancers notice that the server is not ready."""
        if seconds:
            logger.info(
                "stopping: no longer ready; requests are accepted for another %d s. Press Ctrl-C"
                " again to stop at once",
                seconds,
            )
            await wait_for_event(self.stop_now, seconds)
