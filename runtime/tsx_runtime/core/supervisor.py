"""Starts, watches, restarts and ends the workers of one version.

A worker is supervised by a task of its own that walks through its life: start a process, have it load the model, serve
until the process ends, wait a little, start again. The end of the stream on the channel is the worker's death, whatever
killed it; nothing polls. Restarts back off as TorchServe's do, and give up visibly: after the same load error three
times in a row, or when the next wait would go past `maxRetryTimeoutInSec` without a process that was of use. One that
has answered a batch was: a request that kills workers must not shut out the others by being sent again and again.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from datetime import datetime, timezone
from typing import Any

import psutil

from tsx_runtime import wire
from tsx_runtime.core.channel import Channel, LoadError, Sent
from tsx_runtime.core.dispatcher import Dispatcher
from tsx_runtime.core.processes import ProcessStarter, WorkerProcess
from tsx_runtime.errors import LoadFailed, OutOfResources, TsxError, WorkerDied

BACK_OFF = (0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)  # seconds
SAME_LOAD_ERROR = 3
SERVED_WELL = 60.0  # seconds; a worker that was there this long starts its back-off anew, even if nobody asked it anything
EXIT_GRACE = 5.0  # seconds that a worker may take to end after its socket was closed

_GIVEN_UP = (
    ". Its workers were given up because they could not load the model, or kept dying: "
    "the model's description (GET /models/MODEL, or tsx models describe MODEL) has the last error"
)

logger = logging.getLogger("tsx.supervisor")


class WorkerState(enum.Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    BACKING_OFF = "BACKING_OFF"
    FAILED = "FAILED"


class Worker:
    """One worker of a version, over all the processes it has had."""

    def __init__(self, id: str, gpu_id: int | None) -> None:
        self.id = id
        self.gpu_id = gpu_id
        self.state = WorkerState.LOADING
        self.started = datetime.now(timezone.utc)
        self.restarts = 0
        self.load_seconds: float | None = None
        self.device: str | None = None  # what the loaded model runs on, by its own account: cpu, cuda:0
        self.process: WorkerProcess | None = None
        self.channel: Channel | None = None
        self.settled: asyncio.Future[TsxError | None] = asyncio.get_running_loop().create_future()
        self.stopping = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.killed_because: str | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def memory(self) -> int:
        """Resident bytes; 0 where there is no process."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss) if self.pid else 0
        except psutil.Error:
            return 0

    def kill(self, because: str) -> None:
        if self.process is not None:
            self.killed_because = because
            self.process.kill()


class Supervisor:
    """The workers of one version. `order` is made anew for each start, since threads depend on how many there are."""

    def __init__(
        self,
        label: str,
        dispatcher: Dispatcher,
        starter: ProcessStarter,
        order: Callable[[Worker], wire.LoadOrder],
        *,
        ids: Iterator[int],
        next_gpu: Callable[[], int | None],
        response_timeout: float,
        startup_timeout: float,
        max_retry_timeout: float,
    ) -> None:
        self.label = label
        self.workers: list[Worker] = []
        self.last_error: str | None = None
        self.response_timeout = response_timeout
        self.startup_timeout = startup_timeout
        self.max_retry_timeout = max_retry_timeout
        self._dispatcher = dispatcher
        self._starter = starter
        self._order = order
        self._ids = ids
        self._next_gpu = next_gpu

    def scale(self, count: int, *, drain: bool = True) -> Coroutine[Any, Any, None]:
        """Have `count` workers, from now on: requests are accepted at once. What is returned waits until they are ready or gone.

        Those that end answer what they hold first, unless `drain` is off.

        Raises `LoadFailed` when a new worker could not load the model; workers that could go on.
        """
        new = [Worker(str(next(self._ids)), self._next_gpu()) for _ in range(count - len(self.workers))]
        ending = self.workers[count:]
        self.workers = self.workers[:count] + new
        for worker in new:
            worker.task = asyncio.create_task(self._live(worker), name=f"{self.label} worker {worker.id}")
            worker.task.add_done_callback(functools.partial(self._on_task_done, worker))
        self._tell_dispatcher()
        return self._settled(new, [asyncio.ensure_future(self._end(worker, drain)) for worker in ending])

    async def _settled(self, new: list[Worker], ending: list[asyncio.Future[None]]) -> None:
        await asyncio.gather(*ending)
        for error in await asyncio.gather(*(worker.settled for worker in new)):
            if error is not None:
                raise error

    # A worker's life

    async def _live(self, worker: Worker) -> None:
        errors: list[str] = []
        waits = iter(BACK_OFF)
        waited = 0.0
        while not worker.stopping.is_set():
            served = await self._serve_once(worker, errors)
            if worker.stopping.is_set():
                return
            if served:
                waits, waited = iter(BACK_OFF), 0.0
            wait = next(waits, BACK_OFF[-1])
            waited += wait
            if waited > self.max_retry_timeout or (len(errors) >= SAME_LOAD_ERROR and len(set(errors[-SAME_LOAD_ERROR:])) == 1):
                logger.error("%s: worker %s is given up; the last error is in the model's description", self.label, worker.id)
                self._set(worker, WorkerState.FAILED)
                return
            worker.restarts += 1
            self._dispatcher.stats.restarts += 1
            self._set(worker, WorkerState.BACKING_OFF)
            await _wait(worker.stopping, wait)

    async def _serve_once(self, worker: Worker, errors: list[str]) -> bool:
        """One process, from start to end. Whether it was of use: it answered a batch, or was there for a minute."""
        self._set(worker, WorkerState.LOADING)
        worker.started, worker.killed_because = datetime.now(timezone.utc), None
        began = time.monotonic()
        try:
            worker.process, sock = await self._starter.start(f"{self.label} {worker.id}")
        except (OSError, EOFError) as error:  # out of descriptors or memory, or the fork server was ended
            self._note_failure(worker, f"its process could not be started: {error!r}", None, errors)
            return False
        if worker.stopping.is_set():
            worker.process.kill()
        channel = worker.channel = Channel(self._dispatcher)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)
        ended = asyncio.create_task(self._watch_process(worker.process, channel))
        try:
            channel.load(self._order(worker))
            facts = await asyncio.wait_for(asyncio.shield(channel.loaded), self.startup_timeout)
        except (LoadError, EOFError, TimeoutError, asyncio.TimeoutError) as error:
            await self._fail_load(worker, error, ended, errors)
            return False
        errors.clear()
        worker.load_seconds, worker.device = time.monotonic() - began, str(facts["device"])
        if not worker.stopping.is_set():
            self._set(worker, WorkerState.READY)
            ready = "%s: worker %s (pid %s) is ready on %s after %.2f s"
            logger.info(ready, self.label, worker.id, worker.pid, worker.device, worker.load_seconds)
            self._dispatcher.add(channel)
            _settle(worker, None)
        await self._until_end(worker, channel, ended)
        return channel.answered > 0 or time.monotonic() - began > SERVED_WELL

    async def _until_end(self, worker: Worker, channel: Channel, ended: asyncio.Task[int]) -> None:
        overdue = asyncio.create_task(self._watch_response(worker, channel))
        await channel.closed
        overdue.cancel()
        code = await _ended_or_killed(worker, ended)
        why = worker.killed_because or describe_exit(code)
        lost = channel.sent.popleft() if channel.sent else None
        if lost or not worker.stopping.is_set():
            logger.error("%s: worker %s (pid %s) ended: %s", self.label, worker.id, worker.pid, why)
        if lost and worker.killed_because:  # by us: for its time, or for its end
            self._dispatcher.refuse_lost(lost.jobs, _death(code, worker, lost))
        elif lost:
            self._dispatcher.retry_lost(lost, channel.streaming, _death(code, worker, lost))

    async def _watch_process(self, process: WorkerProcess, channel: Channel) -> int:
        """A child of the worker may hold the socket open after the worker's end; then the channel is closed from here."""
        code = await process.ended()
        await asyncio.wait([channel.closed], timeout=1.0)
        channel.abort()
        return code

    async def _watch_response(self, worker: Worker, channel: Channel) -> None:
        """Kill the worker when the batch it works on takes too long. Wakes once a timeout, not once a batch."""
        while True:
            left = self.response_timeout
            if channel.sent and not channel.held:
                left += channel.began - time.monotonic()
            if left <= 0:
                worker.kill(f"it did not answer within {self.response_timeout:g} s (responseTimeout)")
                return
            await asyncio.sleep(left)

    async def _fail_load(self, worker: Worker, error: Exception, ended: asyncio.Task[int], errors: list[str]) -> None:
        assert worker.process is not None
        assert worker.channel is not None
        worker.channel.close()
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            worker.process.kill()
        code = await _ended_or_killed(worker, ended)
        if isinstance(error, LoadError):
            message, trace = error.message, error.traceback
        elif isinstance(error, EOFError):
            message, trace = f"the worker ended while it loaded the model: {worker.killed_because or describe_exit(code)}", None
        else:
            message, trace = f"the model was not loaded within {self.startup_timeout:g} s; raise startupTimeout if it needs longer", None
        self._note_failure(worker, message, trace, errors)

    def _note_failure(self, worker: Worker, message: str, trace: str | None, errors: list[str]) -> None:
        errors.append(message)
        if worker.stopping.is_set():
            return
        self.last_error = f"{message}\n\n{trace}" if trace else message
        logger.error("%s: worker %s could not load the model: %s", self.label, worker.id, message)
        _settle(worker, LoadFailed(message, traceback=trace))

    def _on_task_done(self, worker: Worker, task: asyncio.Task[None]) -> None:
        """The boundary for what nobody expected: the worker is given up, and its starter is told."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("%s: worker %s is given up", self.label, worker.id, exc_info=error)
        worker.kill("its supervision failed")
        self._set(worker, WorkerState.FAILED)
        _settle(worker, LoadFailed(f"the worker's supervision failed: {error!r}"))

    # Ending

    async def _end(self, worker: Worker, drain: bool) -> None:
        """Let it answer what it holds, then close its socket; one that does not end by itself is killed."""
        worker.stopping.set()
        _settle(worker, None)
        channel = worker.channel
        if worker.state is WorkerState.LOADING:
            worker.kill("it is not needed any more")
        elif worker.state is WorkerState.READY and channel is not None:
            self._set(worker, WorkerState.UNLOADING)
            self._dispatcher.remove(channel)
            if drain:
                await channel.drained()
            elif channel.sent:
                worker.kill("it was stopped before it had answered")
        if channel is not None:
            channel.close()
        assert worker.task is not None
        _, late = await asyncio.wait([worker.task], timeout=EXIT_GRACE)
        if late:
            worker.kill("it did not end when it was told to")
            await asyncio.wait([worker.task])

    # Telling

    def _set(self, worker: Worker, state: WorkerState) -> None:
        worker.state = state
        self._tell_dispatcher()

    def _tell_dispatcher(self) -> None:
        """A worker that serves now is one that will serve again when it dies."""
        over = (WorkerState.UNLOADING, WorkerState.FAILED)
        failed = any(worker.state is WorkerState.FAILED for worker in self.workers)
        self._dispatcher.accept(any(worker.state not in over for worker in self.workers), _GIVEN_UP if failed else "")


def _settle(worker: Worker, error: TsxError | None) -> None:
    if not worker.settled.done():
        worker.settled.set_result(error)


async def _ended_or_killed(worker: Worker, ended: asyncio.Task[int]) -> int:
    """How the process ended. A thread that the handler left behind would keep it alive, unheard."""
    _, late = await asyncio.wait([ended], timeout=EXIT_GRACE)
    if late:
        worker.kill("it closed its connection to the server, but did not end")
    return await ended


def describe_exit(code: int) -> str:
    """A process's end in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = "; the system may have been out of memory" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def _death(code: int, worker: Worker, lost: Sent) -> TsxError:
    """TorchServe's first words, which its clients look for, then why and what now."""
    because = worker.killed_because
    if because is None and code in (-signal.SIGKILL, 137):
        return OutOfResources("Out of resources: the worker was killed, as the system does when memory runs out. Worker died.")
    now = "" if worker.stopping.is_set() else " A new worker is started; send the request again."
    if lost.deaths:
        now = " The request was tried again without those that it came with, and a worker died again: it is the cause."
    return WorkerDied(f"Worker died. Cause: {because or describe_exit(code)}.{now}")


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except (TimeoutError, asyncio.TimeoutError):
        return
