"""Threads for calls of unknown duration: downloads and plugins.

The event loop's own pool is for what ends soon. A few calls that hang would fill it and block every
other user of it, and then the shutdown of the server, which waits for the pool. These are separate
daemon threads with a limit on their number.
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
    """`most` at a time; further calls are refused."""

    def __init__(self, most: int, what: str) -> None:
        """`what` the calls are, in the plural."""
        self._most = most
        self._what = what
        self._busy = 0

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """What it returns or raises. Cancelling this leaves the call to itself. Raises
        Unavailable.
        """
        if self._busy >= self._most:
            raise Unavailable(
                f"{self._busy} {self._what} are running, which is the limit. Try again when one has"
                " ended."
            )
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[ResultT] = loop.create_future()
        self._busy += 1
        threading.Thread(
            target=self._run, args=(loop, ended, function), name=f"tsx {self._what}", daemon=True
        ).start()
        return await ended

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        ended: asyncio.Future[Any],
        function: Callable[[], Any],
    ) -> None:
        result = error = None
        try:
            result = function()
        except (
            BaseException
        ) as raised:  # the thread's boundary: it is raised where the call is waited for
            error = (
                RuntimeError("it raised StopIteration")
                if isinstance(raised, StopIteration)
                else raised
            )  # which no future takes
        with suppress(RuntimeError):  # the loop has ended, and with it every waiter
            loop.call_soon_threadsafe(self._tell, ended, result, error)

    def _tell(self, ended: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._busy -= 1
        if ended.done():
            return
        if error is None:
            ended.set_result(result)
        else:
            ended.set_exception(error)
