"""The workers of one version: starts and stops as many as configured.

`lifecycle.py` runs each of them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tsx_runtime.core.workers.instance import EXIT_GRACE
from tsx_runtime.core.workers.lifecycle import NOT_NEEDED, SupervisionConfig, WorkerLifecycle
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.errors import LoadFailed

_STOPPED = "it was stopped before it answered"
_GIVEN_UP = (
    ". Its workers were given up, because they could not load the model or kept dying: "
    "the model's description (GET /models/MODEL, or tsx models describe MODEL) has the last error. "
    "The server tries them again after some minutes. To try again at once: "
)

_NOT_STARTED = (WorkerState.FAILED, WorkerState.BACKING_OFF)

logger = logging.getLogger("tsx.supervisor")


class Supervisor:
    """Starts and stops the workers of a version, and tells the dispatcher whether a worker serves
    or is starting.
    """

    def __init__(
        self,
        config: SupervisionConfig,
        *,
        ids: Iterator[int],
        next_gpus: Callable[[], tuple[int, ...]],
    ) -> None:
        self.workers: list[Worker] = []
        self.on_state: Callable[[], None] = lambda: (
            None
        )  # called when a worker's state may have changed
        self._config = config
        self._dispatcher = config.dispatcher
        self._ids = ids
        self._next_gpus = next_gpus
        config.on_state = self._tell_dispatcher
        config.dispatcher.seconds_until_ready = self.seconds_until_ready

    def seconds_until_ready(self) -> float | None:
        """Until the first starting worker serves, as far as is known. None where none is
        starting.
        """
        now = time.monotonic()
        left = [
            worker.seconds_until_ready(now, self._config.load_seconds) for worker in self.workers
        ]
        return min((seconds for seconds in left if seconds is not None), default=None)

    def scale(
        self, count: int, *, drain: bool = True, retry: bool = True
    ) -> Coroutine[Any, Any, None]:
        """Have `count` workers, from now on: requests are accepted at once.

        What is returned waits until they are ready or gone.

        Those that end answer what they hold first, unless `drain` is off. With `retry`, new ones
        take the places of those that failed, whose next attempt would be later.

        Raises `LoadFailed` when a new worker could not load the model; workers that could go on.
        """
        failed = [
            worker
            for worker in self.workers
            if retry and (worker.given_up or worker.state in _NOT_STARTED)
        ]
        going_on = [worker for worker in self.workers if worker not in failed]
        ending, new = failed + going_on[count:], []
        self.workers = going_on[:count]
        while len(self.workers) < count:
            new.append(Worker(str(next(self._ids)), self._next_gpus(), time.monotonic()))
            self.workers.append(new[-1])
        for worker in new:
            worker.task = asyncio.create_task(
                WorkerLifecycle(worker, self._config).run(),
                name=f"{self._config.label} worker {worker.id}",
            )
            worker.task.add_done_callback(functools.partial(self._on_task_done, worker))
        self._tell_dispatcher()
        return self._settled(
            new, [asyncio.ensure_future(self._end(worker, drain)) for worker in ending]
        )

    async def _settled(self, new: list[Worker], ending: list[asyncio.Future[None]]) -> None:
        await asyncio.shield(
            asyncio.gather(*ending)
        )  # the caller may be cancelled; a worker that ends half way would stay for good
        for error in await asyncio.gather(*(worker.settled for worker in new)):
            if error is not None:
                raise error

    def _on_task_done(self, worker: Worker, task: asyncio.Task[None]) -> None:
        """The boundary for unexpected errors: the worker is given up, and its starter gets the
        error.
        """
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("%s: worker %s is given up", self._config.label, worker.id, exc_info=error)
        worker.kill("its supervision failed")
        self._config.set_state(worker, WorkerState.FAILED)
        worker.settle(LoadFailed(f"the worker's supervision failed: {error!r}"))

    async def _end(self, worker: Worker, drain: bool) -> None:
        """Let it answer what it holds, then close its socket; one that does not end by itself is
        killed.
        """
        worker.stopping.set()
        worker.settle(None)
        instance = worker.instance
        if worker.state is WorkerState.LOADING:
            worker.kill(NOT_NEEDED)
        elif worker.successor is not None:
            worker.successor.kill(NOT_NEEDED)
        if worker.state is WorkerState.READY and instance is not None:
            self._config.set_state(worker, WorkerState.UNLOADING)
            self._dispatcher.remove(instance.channel)
            if drain:
                await instance.channel.drained()
        for retiring in worker.retiring:  # they would wait for the ends of their sequences
            self._dispatcher.remove(retiring.channel)
        for each in [instance, *worker.retiring]:
            if each is not None:
                if each.channel.sent and not drain:
                    each.kill(_STOPPED)
                elif not drain or each is instance:
                    each.channel.close()
        assert worker.task is not None
        _, late = await asyncio.wait([worker.task], timeout=EXIT_GRACE)
        if late:
            worker.kill("it did not stop when requested")
            await asyncio.wait([worker.task])
        if worker.retiring:
            await asyncio.wait(list(worker.retiring.values()))

    def _tell_dispatcher(self) -> None:
        """A worker that serves now is one that will serve again when it dies."""
        over = (WorkerState.UNLOADING, WorkerState.FAILED)
        failed = any(worker.state is WorkerState.FAILED for worker in self.workers)
        accepting = any(worker.state not in over for worker in self.workers)
        self._dispatcher.accept(
            accepting, "" if accepting else (_GIVEN_UP if failed else ": ") + self._config.way_back
        )
        self.on_state()
