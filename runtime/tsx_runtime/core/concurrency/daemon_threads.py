"""Threads for calls of unknown duration: downloads and plugins.

Calls that hang must not block the event loop's own pool: every other user shares it, and a shutdown
waits for it. Such calls run here, in a limited number of separate daemon threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from tsx_runtime.errors import Unavailable

ResultT = TypeVar("ResultT")


class DaemonThreads:
    """A limited number of daemon threads; a call is refused while all of them are busy."""

    def __init__(self, max_threads: int, purpose: str) -> None:
        """Run at most `max_threads` calls at a time; `purpose` is their plural noun in messages."""
        self._max_threads = max_threads
        self._purpose = purpose
        self._busy = 0

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Run a function in a thread; return its result or raise its error.

        If the caller is cancelled, the thread still finishes the function.

        Raises:
            Unavailable: All threads are busy.
        """
        if self._busy >= self._max_threads:
            raise Unavailable(
                f"{self._busy} {self._purpose} are running, which is the limit. Try again when one"
                " has ended."
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ResultT] = loop.create_future()
        self._busy += 1
        threading.Thread(
            target=self._run,
            args=(loop, future, function),
            name=f"tsx {self._purpose}",
            daemon=True,
        ).start()
        return await future

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
        function: Callable[[], Any],
    ) -> None:
        result = error = None
        try:
            result = function()
        except BaseException as raised:
            # The thread ends here, so the caller gets the error. A future cannot hold
            # StopIteration.
            error = (
                RuntimeError("it raised StopIteration")
                if isinstance(raised, StopIteration)
                else raised
            )
        # If the event loop is closed, no caller waits any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._end_call, future, result, error)

    def _end_call(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None
    ) -> None:
        self._busy -= 1
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
