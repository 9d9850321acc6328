"""Background tasks that outlive their callers.

The group holds a reference to each task until it ends, since the event loop holds only weak ones.
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
        """Start loading a version, and ignore its failure.

        A failure is already logged and shown in the model's description.
        """
        self.begin(_swallow_failure(work))

    async def run_shielded(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work that continues even if the caller is cancelled."""
        await asyncio.shield(self.begin(work))

    async def wait_all(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _swallow_failure(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except (LoadFailed, Conflict):
        return
