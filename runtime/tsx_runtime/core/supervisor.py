"""Starts, watches, replaces, restarts and ends the workers of one version.

A worker is supervised by a task of its own that walks through its life: start a process, have it load the model, serve
until the process ends, wait a little, start again. The end of the stream on the channel is the worker's death, whatever
killed it. Restarts back off as TorchServe's do, and give up visibly: after the same load error three times in a row, or
when the next wait would go past `maxRetryTimeoutInSec` without a process that was of use. One that has answered a batch
was: a request that kills workers must not shut out the others by being sent again and again.

Two things give no event, so each process is looked at every `heartbeat` seconds: that it is stuck (it is killed, and what
it held is answered by another), and that it has served for long enough (`Recycling`). Then its successor starts and loads
beside it, and takes over before the old one is drained; workers of one version are replaced one at a time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from datetime import datetime, timezone
from typing import Any

from tsx_runtime import wire
from tsx_runtime.core.channel import LoadError
from tsx_runtime.core.dispatcher import Dispatcher
from tsx_runtime.core.health import MEGA, Heartbeat, Recycling, Verdict
from tsx_runtime.core.processes import ProcessStarter
from tsx_runtime.core.running import EXIT_GRACE, Running, death, describe_exit
from tsx_runtime.core.worker import Worker, WorkerState
from tsx_runtime.errors import LoadFailed, TsxError

BACK_OFF = (0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)  # seconds
SAME_LOAD_ERROR = 3
SERVED_WELL = 60.0  # seconds; a worker that was there this long starts its back-off anew, even if nobody asked it anything
TRY_AGAIN = 30.0  # seconds until a worker that could not be replaced is tried to be replaced again

_NOT_NEEDED = "it is not needed any more"
_STOPPED = "it was stopped before it had answered"
_GIVEN_UP = (
    ". Its workers were given up because they could not load the model, or kept dying: "
    "the model's description (GET /models/MODEL, or tsx models describe MODEL) has the last error"
)

logger = logging.getLogger("tsx.supervisor")


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
        recycling: Recycling,
        heartbeat: float,
        heartbeat_timeout: float,
    ) -> None:
        self.label = label
        self.workers: list[Worker] = []
        self.last_error: str | None = None
        self.response_timeout = response_timeout
        self.startup_timeout = startup_timeout
        self.max_retry_timeout = max_retry_timeout
        self.recycling = recycling
        self.heartbeat = heartbeat
        self.heartbeat_timeout = heartbeat_timeout
        self._dispatcher = dispatcher
        self._starter = starter
        self._order = order
        self._ids = ids
        self._next_gpu = next_gpu
        self._replacing = False  # one worker at a time, so that a model never needs more than one worker's room beside its own
        self._timeouts_changed = asyncio.Event()

    def set_timeouts(self, response: float, startup: float) -> None:
        """From now on, also for what workers have begun."""
        self.response_timeout, self.startup_timeout = response, startup
        changed, self._timeouts_changed = self._timeouts_changed, asyncio.Event()
        changed.set()

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
            self._count_restart(worker)
            self._set(worker, WorkerState.BACKING_OFF)
            await _wait(worker.stopping, wait)

    def _count_restart(self, worker: Worker) -> None:
        worker.restarts += 1
        self._dispatcher.stats.restarts += 1

    async def _serve_once(self, worker: Worker, errors: list[str]) -> bool:
        """One process from start to end, and those that take over from it.

        Whether the last was of use: it answered somebody, or was there for a minute.
        """
        self._set(worker, WorkerState.LOADING)
        worker.started = datetime.now(timezone.utc)
        try:
            worker.running = running = await self._begin(worker)
        except (OSError, EOFError) as error:
            self._note_failure(worker, _cannot_start(error), None, [])  # which is no fault of the model, and may pass
            return False
        if worker.stopping.is_set():
            running.kill(_NOT_NEEDED)
        try:
            await running.load(self._order(worker), self.startup_timeout)
        except (LoadError, EOFError, TimeoutError, asyncio.TimeoutError) as error:
            self._note_failure(worker, *await self._why_not_loaded(running, error), errors)
            return False
        errors.clear()
        last: Running | None = running
        while last is not None:
            running = last
            self._take_over(worker, running)
            last = await self._until_over(worker, running)
        return running.channel.answered > 0 or running.age > SERVED_WELL

    async def _begin(self, worker: Worker) -> Running:
        return await Running.start(self._starter, self._dispatcher, f"{self.label} {worker.id}")

    def _take_over(self, worker: Worker, running: Running) -> None:
        if worker.stopping.is_set():
            return
        worker.running = running
        self._set(worker, WorkerState.READY)
        ready = "%s: worker %s (pid %s) is ready on %s after %.2f s"
        logger.info(ready, self.label, worker.id, running.pid, running.device, running.load_seconds)
        self._dispatcher.add(running.channel)
        if running.loaded_memory >= self.recycling.memory * MEGA > 0:
            text = "%s: worker %s has %d MB when it has loaded the model, so maxWorkerMemory, which is %d, cannot hold: raise it"
            logger.warning(text, self.label, worker.id, running.loaded_memory // MEGA, self.recycling.memory)
        _settle(worker, None)

    async def _until_over(self, worker: Worker, running: Running) -> Running | None:
        """Wait until it has ended, or until another process has loaded the model and is to take over: that one."""
        over = asyncio.create_task(self._until_end(worker, running))
        while True:
            due = asyncio.ensure_future(running.due.wait())
            await asyncio.wait([over, due], return_when=asyncio.FIRST_COMPLETED)
            due.cancel()
            successor = None if over.done() or worker.stopping.is_set() else await self._succeed(worker, running)
            if successor is not None:
                worker.retiring[running] = asyncio.create_task(self._retire(worker, running, over))
                return successor
            if over.done() or worker.stopping.is_set():
                await over
                return None

    async def _until_end(self, worker: Worker, running: Running) -> None:
        watching = [asyncio.create_task(watch(running)) for watch in (self._watch_response, self._watch_health)]
        channel = running.channel
        await channel.closed
        for watch in watching:
            watch.cancel()
        code = await running.exit_code()
        lost = channel.sent.popleft() if channel.sent else None
        if lost or not (worker.stopping.is_set() or running is not worker.running):
            why = running.killed_because or describe_exit(code)
            self.last_error = f"worker {worker.id} (pid {running.pid}) ended: {why}"
            logger.error("%s: %s", self.label, self.last_error)
        if lost is None:
            return
        error = death(running, code, lost, stopping=worker.stopping.is_set())
        if running.stuck and lost.deaths == 0:
            self._dispatcher.take_back(lost, channel.streaming, error)
        elif running.killed_because and not running.stuck and not running.unheard:  # by us: for its time, or for its end
            self._dispatcher.refuse_lost(lost.jobs, error)
        else:
            self._dispatcher.retry_lost(lost, channel.streaming, error)

    async def _watch_response(self, running: Running) -> None:
        """Kill the worker when the batch it works on takes too long. Wakes once a timeout, not once a batch."""
        while True:
            left = self.response_timeout
            if running.channel.sent and not running.channel.held:
                left += running.channel.began - time.monotonic()
            if left <= 0:
                running.kill(f"it did not answer within {self.response_timeout:g} s (responseTimeout)")
                return
            await _wait(self._timeouts_changed, left)

    async def _watch_health(self, running: Running) -> None:
        """Kill the worker when it is stuck, and see when it is due to be replaced."""
        heartbeat = Heartbeat(self.heartbeat, self.heartbeat_timeout)
        channel = running.channel
        while True:
            await asyncio.sleep(self.heartbeat)
            stopped, busy = running.is_stopped(), bool(channel.sent)
            pings = 0 if channel.held else channel.pings  # nothing is read from it while a client is slow
            verdict = heartbeat.look(stopped=stopped, busy=busy, answered=channel.answered, pings=pings)
            if verdict is Verdict.ASK:
                channel.ping()
            elif verdict is Verdict.STOPPED:
                self._kill_stuck(running, "stopped", "its process was stopped (SIGSTOP)")
            elif verdict is Verdict.SILENT:
                self._kill_stuck(running, "silent", f"it gave no sign of life for {self.heartbeat_timeout:g} s (heartbeat_timeout)")
            if reason := self._reason_to_recycle(running):
                running.reason = reason
                running.due.set()

    def _kill_stuck(self, running: Running, kind: str, because: str) -> None:
        self._dispatcher.stats.stuck[kind] += 1
        running.kill(because, stuck=True)

    # Taking over

    def _reason_to_recycle(self, running: Running) -> str | None:
        if self._replacing or time.monotonic() < running.not_before:
            return None
        limits = self.recycling
        if running.loaded_memory >= limits.memory * MEGA:  # a fresh one would be due at once, and so on without end
            limits = limits._replace(memory=0)
        memory = running.memory() if limits.memory else 0
        return limits.reason(running.early, requests=running.channel.answered, memory=memory, age=running.age)

    async def _succeed(self, worker: Worker, running: Running) -> Running | None:
        """A new process that has loaded the model while the old one serves. None where there is none: the old one goes on."""
        running.due.clear()
        if self._replacing:  # another one has come first
            return None
        self._replacing = True
        try:
            successor = worker.successor = await self._begin(worker)
            if worker.stopping.is_set():
                successor.kill(_NOT_NEEDED)
            await successor.load(self._order(worker), self.startup_timeout)
        except (LoadError, EOFError, OSError, TimeoutError, asyncio.TimeoutError) as error:
            await self._put_off(worker, running, error)
            return None
        finally:
            self._replacing, worker.successor = False, None
        if running.channel.closed.done():  # it died meanwhile, which is no recycling
            self._count_restart(worker)
            return successor
        text = "%s: worker %s (pid %s) has reached its limit of %s; pid %s takes over"
        logger.info(text, self.label, worker.id, running.pid, running.reason, successor.pid)
        self._dispatcher.stats.recycled[running.reason] += 1
        worker.started = datetime.now(timezone.utc)
        return successor

    async def _put_off(self, worker: Worker, running: Running, error: Exception) -> None:
        """The successor did not come to be. Try again later, while the old one serves."""
        if worker.successor is not None:
            message, trace = await self._why_not_loaded(worker.successor, error)
        else:
            message, trace = _cannot_start(error), None
        if worker.stopping.is_set():
            return
        self.last_error = f"{message}\n\n{trace}" if trace else message
        text = "%s: worker %s (pid %s) has reached its limit of %s but goes on, since no other could take over: %s"
        logger.error(text, self.label, worker.id, running.pid, running.reason, message)
        running.not_before = time.monotonic() + TRY_AGAIN

    async def _retire(self, worker: Worker, running: Running, over: asyncio.Task[None]) -> None:
        """Its successor serves: it answers what it holds, then ends."""
        try:
            self._dispatcher.remove(running.channel)
            await running.channel.drained()
            running.channel.close()
            await over
        finally:
            del worker.retiring[running]

    async def _why_not_loaded(self, running: Running, error: Exception) -> tuple[str, str | None]:
        """What is wrong, and the traceback if there is one; the process is ended."""
        running.channel.close()
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            running.process.kill()
        code = await running.exit_code()
        if isinstance(error, LoadError):
            return error.message, error.traceback
        if isinstance(error, EOFError):
            return f"the worker ended while it loaded the model: {running.killed_because or describe_exit(code)}", None
        return f"the model was not loaded within {self.startup_timeout:g} s; raise startupTimeout if it needs longer", None

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
        running = worker.running
        if worker.state is WorkerState.LOADING:
            worker.kill(_NOT_NEEDED)
        elif worker.successor is not None:
            worker.successor.kill(_NOT_NEEDED)
        if worker.state is WorkerState.READY and running is not None:
            self._set(worker, WorkerState.UNLOADING)
            self._dispatcher.remove(running.channel)
            if drain:
                await running.channel.drained()
        for each in [running, *worker.retiring]:
            if each is not None:
                if each.channel.sent and not drain:
                    each.kill(_STOPPED)
                elif not drain or each is running:
                    each.channel.close()
        assert worker.task is not None
        _, late = await asyncio.wait([worker.task], timeout=EXIT_GRACE)
        if late:
            worker.kill("it did not end when it was told to")
            await asyncio.wait([worker.task])
        if worker.retiring:
            await asyncio.wait(list(worker.retiring.values()))

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


def _cannot_start(error: Exception) -> str:
    """Out of descriptors or memory, or the fork server was ended."""
    return f"its process could not be started: {error!r}"


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except (TimeoutError, asyncio.TimeoutError):
        return
