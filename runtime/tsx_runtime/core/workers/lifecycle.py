"""The life of one worker: a process that loads the model and serves, then the next one, until it is stopped or given up.

The end of the stream on the channel is a process's death, whatever killed it. Restarts back off as TorchServe's do, and give
up visibly: after the same load error three times in a row, or when the next wait would go past `maxRetryTimeoutInSec`
without a process that was of use. One that has answered a batch was: a request that kills workers must not shut out the
others by being sent again and again.

Two things give no event, so each process is looked at every `heartbeat` seconds: that it is stuck (it is killed, and what
it held is answered by another), and that it has served for long enough (`Recycling`). Then its successor starts and loads
beside it, and takes over before the old one is drained; workers of one version are replaced one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone

from tsx_runtime import wire
from tsx_runtime.core.scheduling.channel import LoadError
from tsx_runtime.core.scheduling.dispatcher import Dispatcher
from tsx_runtime.core.workers.forked import Starter
from tsx_runtime.core.workers.health import MEGA, Heartbeat, Recycling, Verdict
from tsx_runtime.core.workers.instance import Running, death, describe_exit
from tsx_runtime.core.workers.launch import Launch
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.errors import LoadFailed

BACK_OFF = (0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)  # seconds
SAME_LOAD_ERROR = 3
SERVED_WELL = 60.0  # seconds; a worker that was there this long starts its back-off anew, even if nobody asked it anything
TRY_AGAIN = 30.0  # seconds until a worker that could not be replaced is tried to be replaced again
NOT_NEEDED = "it is not needed any more"

logger = logging.getLogger("tsx.supervisor")


@dataclass(eq=False)
class Terms:
    """On which the workers of one version live, and what they know of each other. Timeouts are in seconds."""

    label: str
    dispatcher: Dispatcher
    starter: Starter
    order: Callable[[Worker], wire.LoadOrder]  # made anew for each start, since threads depend on how many workers there are
    launch: Callable[[Worker], Launch | None]  # as a program of its own, where a fork will not do
    response_timeout: float
    startup_timeout: float
    max_retry_timeout: float
    recycling: Recycling
    heartbeat: float
    heartbeat_timeout: float
    on_state: Callable[[], None]  # a worker's has changed
    last_error: str | None = None
    load_seconds: float | None = None  # that a process last took until it had loaded the model
    replacing: bool = False  # one worker at a time, so that a model never needs more than one worker's room beside its own
    timeouts_changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set_timeouts(self, response: float, startup: float) -> None:
        self.response_timeout, self.startup_timeout = response, startup
        changed, self.timeouts_changed = self.timeouts_changed, asyncio.Event()
        changed.set()

    def tell_error(self, message: str, trace: str | None = None) -> None:
        self.last_error = f"{message}\n\n{trace}" if trace else message
        self.dispatcher.stats.told.add_error(message, trace or "")

    def set_state(self, worker: Worker, state: WorkerState) -> None:
        worker.state, worker.since = state, time.monotonic()
        self.on_state()


class Life:
    """`run` walks through it."""

    def __init__(self, worker: Worker, terms: Terms) -> None:
        self._worker = worker
        self._terms = terms

    async def run(self) -> None:
        errors: list[str] = []
        waits = iter(BACK_OFF)
        waited = 0.0
        while not self._worker.stopping.is_set():
            served = await self._serve_once(errors)
            if self._worker.stopping.is_set():
                return
            if served:
                waits, waited = iter(BACK_OFF), 0.0
            wait = next(waits, BACK_OFF[-1])
            waited += wait
            if waited > self._terms.max_retry_timeout or (len(errors) >= SAME_LOAD_ERROR and len(set(errors[-SAME_LOAD_ERROR:])) == 1):
                logger.error("%s: worker %s is given up; the last error is in the model's description", self._terms.label, self._worker.id)
                self._terms.set_state(self._worker, WorkerState.FAILED)
                return
            self._count_restart()
            self._worker.next_start = time.monotonic() + wait
            self._terms.set_state(self._worker, WorkerState.BACKING_OFF)
            await _wait(self._worker.stopping, wait)

    def _count_restart(self) -> None:
        self._worker.restarts += 1
        self._terms.dispatcher.stats.restarts += 1

    async def _serve_once(self, errors: list[str]) -> bool:
        """One process from start to end, and those that take over from it.

        Whether the last was of use: it answered somebody, or was there for a minute.
        """
        self._terms.set_state(self._worker, WorkerState.LOADING)
        self._worker.started = datetime.now(timezone.utc)
        try:
            self._worker.running = running = await self._begin()
        except (OSError, EOFError) as error:
            self._note_failure(_cannot_start(error), None, [])  # which is no fault of the model, and may pass
            return False
        if self._worker.stopping.is_set():
            running.kill(NOT_NEEDED)
        try:
            await running.load(self._terms.order(self._worker), self._terms.startup_timeout)
        except (LoadError, EOFError, TimeoutError, asyncio.TimeoutError) as error:
            self._note_failure(*await self._why_not_loaded(running, error), errors)
            return False
        errors.clear()
        last: Running | None = running
        while last is not None:
            running = last
            self._take_over(running)
            last = await self._until_over(running)
        return running.channel.answered > 0 or running.age > SERVED_WELL

    async def _begin(self) -> Running:
        name, launch = f"{self._terms.label} {self._worker.id}", self._terms.launch(self._worker)
        running = await Running.start(self._terms.starter, self._terms.dispatcher, name, launch)
        running.channel.worker = self._worker.id
        return running

    def _take_over(self, running: Running) -> None:
        if self._worker.stopping.is_set():
            return
        self._worker.running = running
        self._terms.load_seconds = running.load_seconds
        self._terms.set_state(self._worker, WorkerState.READY)
        ready = "%s: worker %s (pid %s) is ready on %s after %.2f s"
        logger.info(ready, self._terms.label, self._worker.id, running.pid, running.device, running.load_seconds)
        self._terms.dispatcher.add(running.channel)
        if running.loaded_memory >= self._terms.recycling.memory * MEGA > 0:
            text = "%s: worker %s has %d MB when it has loaded the model, so maxWorkerMemory, which is %d, cannot hold: raise it"
            logger.warning(text, self._terms.label, self._worker.id, running.loaded_memory // MEGA, self._terms.recycling.memory)
        self._worker.settle(None)

    async def _until_over(self, running: Running) -> Running | None:
        """Wait until it has ended, or until another process has loaded the model and is to take over: that one."""
        over = asyncio.create_task(self._until_end(running))
        while True:
            due = asyncio.ensure_future(running.due.wait())
            await asyncio.wait([over, due], return_when=asyncio.FIRST_COMPLETED)
            due.cancel()
            successor = None if over.done() or self._worker.stopping.is_set() else await self._succeed(running)
            if successor is not None:
                self._worker.retiring[running] = asyncio.create_task(self._retire(running, over))
                return successor
            if over.done() or self._worker.stopping.is_set():
                await over
                return None

    async def _until_end(self, running: Running) -> None:
        watching = [asyncio.create_task(self._keep(watch, running)) for watch in (self._watch_response, self._watch_health)]
        channel = running.channel
        await channel.closed
        for watch in watching:
            watch.cancel()
        code = await running.exit_code()
        lost = channel.sent.popleft() if channel.sent else None
        if lost or not (self._worker.stopping.is_set() or running is not self._worker.running):
            why = running.killed_because or describe_exit(code)
            self._terms.tell_error(f"worker {self._worker.id} (pid {running.pid}) ended: {why}")
            logger.error("%s: %s", self._terms.label, self._terms.last_error)
        if lost is None:
            return
        error = death(running, code, lost, stopping=self._worker.stopping.is_set())
        if running.stuck and lost.deaths == 0:
            self._terms.dispatcher.take_back(lost, channel.streaming, error)
        elif running.killed_because and not running.stuck and not running.unheard:  # by us: for its time, or for its end
            self._terms.dispatcher.refuse_all(lost.jobs, error)
        else:
            self._terms.dispatcher.retry_lost(lost, channel.streaming, error)

    async def _keep(self, watch: Callable[[Running], Awaitable[None]], running: Running) -> None:
        """Nobody waits for a watch, and one that ended unheard would leave a worker that hangs to itself."""
        while True:
            try:
                return await watch(running)
            except Exception:  # the boundary of a task
                logger.exception("%s: the watch over worker %s failed, and is begun anew", self._terms.label, self._worker.id)
                await asyncio.sleep(self._terms.heartbeat)

    async def _watch_response(self, running: Running) -> None:
        """Kill the worker when the batch it works on takes too long. Wakes once a timeout, not once a batch."""
        while True:
            left = self._terms.response_timeout
            if running.channel.sent and not running.channel.held:
                left += running.channel.began - time.monotonic()
            if left <= 0:
                running.kill(f"it did not answer within {self._terms.response_timeout:g} s (responseTimeout)")
                return
            await _wait(self._terms.timeouts_changed, left)

    async def _watch_health(self, running: Running) -> None:
        """Kill the worker when it is stuck, and see when it is due to be replaced."""
        heartbeat = Heartbeat(self._terms.heartbeat, self._terms.heartbeat_timeout)
        channel = running.channel
        while True:
            await asyncio.sleep(self._terms.heartbeat)
            stopped, busy = running.is_stopped(), bool(channel.sent)
            pings = 0 if channel.held else channel.pings  # nothing is read from it while a client is slow
            verdict = heartbeat.look(stopped=stopped, busy=busy, answered=channel.answered, pings=pings)
            if verdict is Verdict.ASK:
                channel.ping()
            elif verdict is Verdict.STOPPED:
                self._kill_stuck(running, "stopped", "its process was stopped (SIGSTOP)")
            elif verdict is Verdict.SILENT:
                self._kill_stuck(running, "silent", f"it gave no sign of life for {self._terms.heartbeat_timeout:g} s (heartbeat_timeout)")
            if reason := self._reason_to_recycle(running):
                running.reason = reason
                running.due.set()

    def _kill_stuck(self, running: Running, kind: str, because: str) -> None:
        self._terms.dispatcher.stats.stuck[kind] += 1
        running.kill(because, stuck=True)

    # Taking over

    def _reason_to_recycle(self, running: Running) -> str | None:
        if self._terms.replacing or time.monotonic() < running.not_before:
            return None
        if running.cores is not None and running.cores != self._terms.order(self._worker)["cores"]:
            return "cores"  # the number of workers has changed since, and with it what each of them has
        limits = self._terms.recycling
        if running.loaded_memory >= limits.memory * MEGA:  # a fresh one would be due at once, and so on without end
            limits = limits._replace(memory=0)
        memory = running.memory() if limits.memory else 0
        return limits.reason(running.early, requests=running.channel.answered, memory=memory, age=running.age)

    async def _succeed(self, running: Running) -> Running | None:
        """A new process that has loaded the model while the old one serves. None where there is none: the old one goes on."""
        running.due.clear()
        if self._terms.replacing:  # another one has come first
            return None
        self._terms.replacing = True
        try:
            successor = self._worker.successor = await self._begin()
            if self._worker.stopping.is_set():
                successor.kill(NOT_NEEDED)
            await successor.load(self._terms.order(self._worker), self._terms.startup_timeout)
        except (LoadError, EOFError, OSError, TimeoutError, asyncio.TimeoutError) as error:
            await self._put_off(running, error)
            return None
        finally:
            self._terms.replacing, self._worker.successor = False, None
        if running.channel.closed.done():  # it died meanwhile, which is no recycling
            self._count_restart()
            return successor
        text = "%s: worker %s (pid %s) has reached its limit of %s; pid %s takes over"
        logger.info(text, self._terms.label, self._worker.id, running.pid, running.reason, successor.pid)
        self._terms.dispatcher.stats.recycled[running.reason] += 1
        self._worker.started = datetime.now(timezone.utc)
        return successor

    async def _put_off(self, running: Running, error: Exception) -> None:
        """The successor did not come to be. Try again later, while the old one serves."""
        if self._worker.successor is not None:
            message, trace = await self._why_not_loaded(self._worker.successor, error)
        else:
            message, trace = _cannot_start(error), None
        if self._worker.stopping.is_set():
            return
        self._terms.tell_error(message, trace)
        text = "%s: worker %s (pid %s) has reached its limit of %s but goes on, since no other could take over: %s"
        logger.error(text, self._terms.label, self._worker.id, running.pid, running.reason, message)
        running.not_before = time.monotonic() + TRY_AGAIN

    async def _retire(self, running: Running, over: asyncio.Task[None]) -> None:
        """Its successor serves: it answers what it holds, then ends."""
        try:
            await self._terms.dispatcher.release(running.channel)
            running.channel.close()
            await over
        finally:
            del self._worker.retiring[running]

    async def _why_not_loaded(self, running: Running, error: Exception) -> tuple[str, str | None]:
        """What is wrong, and the traceback if there is one; the process is ended."""
        running.channel.close()
        if isinstance(error, TimeoutError | asyncio.TimeoutError) or (isinstance(error, LoadError) and running.process.unheard_grace):
            running.process.kill()  # of a group, the other ranks wait in vain for the one that failed
        code = await running.exit_code()
        if isinstance(error, LoadError):
            return error.message, error.traceback
        if isinstance(error, EOFError):
            return f"the worker ended while it loaded the model: {running.killed_because or describe_exit(code)}", None
        return f"the model was not loaded within {self._terms.startup_timeout:g} s; raise startupTimeout if it needs longer", None

    def _note_failure(self, message: str, trace: str | None, errors: list[str]) -> None:
        errors.append(message)
        if self._worker.stopping.is_set():
            return
        self._terms.tell_error(message, trace)
        logger.error("%s: worker %s could not load the model: %s", self._terms.label, self._worker.id, message)
        self._worker.settle(LoadFailed(message, traceback=trace))


def _cannot_start(error: Exception) -> str:
    """Out of descriptors or memory, or the fork server was ended."""
    return f"its process could not be started: {error!r}"


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except (TimeoutError, asyncio.TimeoutError):
        return
