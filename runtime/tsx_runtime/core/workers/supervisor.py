"""The workers of one version, which are started and stopped to match their required number.

`lifecycle.py` runs each worker.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tsx_runtime.core.scheduling.service_rate import retry_after
from tsx_runtime.core.workers.instance import EXIT_GRACE_S
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
    """The workers of a version.

    It tells the dispatcher whether a worker serves or is starting.
    """

    def __init__(
        self,
        config: SupervisionConfig,
        *,
        ids: Iterator[int],
        next_gpus: Callable[[], tuple[int, ...]],
    ) -> None:
        self.workers: list[Worker] = []
        # It is called when a worker's state may have changed.
        self.on_state: Callable[[], None] = lambda: None
        self._config = config
        self._dispatcher = config.dispatcher
        self._ids = ids
        self._next_gpus = next_gpus
        config.on_state = self._notify_dispatcher
        config.dispatcher.seconds_until_ready = self.seconds_until_ready

    def seconds_until_ready(self) -> float | None:
        """Estimate the seconds until a starting worker serves; None if none is starting."""
        now = time.monotonic()
        estimates = [
            worker.seconds_until_ready(now, self._config.load_seconds) for worker in self.workers
        ]
        return min((seconds for seconds in estimates if seconds is not None), default=None)

    def retry_after(self) -> int | None:
        """Return `seconds_until_ready` in whole seconds."""
        seconds = self.seconds_until_ready()
        return None if seconds is None else retry_after(0, 0.0, seconds)

    def scale(
        self, count: int, *, drain: bool = True, retry: bool = True
    ) -> Coroutine[Any, Any, None]:
        """Change the number of workers to `count`; requests are accepted at once.

        The returned coroutine waits until all workers are ready or have ended.

        Args:
            count: The number of workers.
            drain: Whether a worker finishes its work before it ends.
            retry: Whether new workers replace those that failed or back off.

        Raises:
            LoadFailed: A new worker could not load the model. The other workers continue.
        """
        failed = [
            worker
            for worker in self.workers
            if retry and (worker.given_up or worker.state in _NOT_STARTED)
        ]
        running = [worker for worker in self.workers if worker not in failed]
        ending, new_workers = failed + running[count:], []
        self.workers = running[:count]
        while len(self.workers) < count:
            new_workers.append(Worker(str(next(self._ids)), self._next_gpus(), time.monotonic()))
            self.workers.append(new_workers[-1])
        for worker in new_workers:
            worker.task = asyncio.create_task(
                WorkerLifecycle(worker, self._config).run(),
                name=f"{self._config.label} worker {worker.id}",
            )
            worker.task.add_done_callback(functools.partial(self._on_task_done, worker))
        self._notify_dispatcher()
        return self._wait_settled(
            new_workers, [asyncio.ensure_future(self._end(worker, drain)) for worker in ending]
        )

    async def _wait_settled(
        self, new_workers: list[Worker], ending: list[asyncio.Future[None]]
    ) -> None:
        # This continues if the caller is cancelled: a half-ended worker would stay forever.
        await asyncio.shield(asyncio.gather(*ending))
        for error in await asyncio.gather(*(worker.settled for worker in new_workers)):
            if error is not None:
                raise error

    def _on_task_done(self, worker: Worker, task: asyncio.Task[None]) -> None:
        """Give up a worker after an unexpected error, and report the error to its starter."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("%s: worker %s is given up", self._config.label, worker.id, exc_info=error)
        worker.kill("its supervision failed")
        self._config.set_state(worker, WorkerState.FAILED)
        worker.settle(LoadFailed(f"the worker's supervision failed: {error!r}"))

    async def _end(self, worker: Worker, drain: bool) -> None:
        """Drain a worker and close its socket; kill it if it does not end by itself."""
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
        # Without this, retiring processes would wait until their sequences end.
        for retiring in worker.retiring:
            self._dispatcher.remove(retiring.channel)
        for process_instance in [instance, *worker.retiring]:
            if process_instance is not None:
                if process_instance.channel.sent and not drain:
                    process_instance.kill(_STOPPED)
                elif not drain or process_instance is instance:
                    process_instance.channel.close()
        assert worker.task is not None
        _, pending = await asyncio.wait([worker.task], timeout=EXIT_GRACE_S)
        if pending:
            worker.kill("it did not stop when requested")
            await asyncio.wait([worker.task])
        if worker.retiring:
            await asyncio.wait(list(worker.retiring.values()))

    def _notify_dispatcher(self) -> None:
        """Tell the dispatcher whether a worker serves, or will serve after a restart."""
        ended_states = (WorkerState.UNLOADING, WorkerState.FAILED)
        failed = any(worker.state is WorkerState.FAILED for worker in self.workers)
        accepting = any(worker.state not in ended_states for worker in self.workers)
        self._dispatcher.accept(
            accepting,
            "" if accepting else (_GIVEN_UP if failed else ": ") + self._config.retry_hint,
        )
        self.on_state()
