"""Tasks that outlive their callers: each is kept until it ends, since the event loop itself holds
only weak references.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tsx_runtime.errors import Conflict, LoadFailed


class TaskGroup:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def load(self, work: Coroutine[Any, Any, None]) -> None:
        """A failure of a version to load is already logged, and in its model's description."""
        self.begin(_swallow_failure(work))

    async def to_the_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Also where the caller is cancelled meanwhile."""
        await asyncio.shield(self.begin(work))

    async def over(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _swallow_failure(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except (LoadFailed, Conflict):
        return
