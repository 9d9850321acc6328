"""The lifecycle of one worker: processes that load the model and serve, one after the other.

The end of the stream on the channel counts as the process's death, whatever its cause. Restarts
back off as TorchServe's do. A worker is given up after the same load error three times in a row. It
is also given up if the waits would exceed `maxRetryTimeoutInSec` without a useful process. A
process that has answered a batch was useful. Otherwise a client could shut out all others by
sending a request that kills workers again and again. A worker that was given up is tried again
after minutes, since the cause may be gone: a file exists again, or memory is free.

Each process is checked every `heartbeat` seconds, because two conditions cause no event. If a
process is stuck, it is killed, and another one answers its requests. If a process has served long
enough (`Recycling`), it gets a successor. The successor loads meanwhile, then takes over, and the
old process is drained. Workers of one version are replaced one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone

from tsx_archiver.metadata.forms import REFERENCE
from tsx_runtime import wire
from tsx_runtime.core.concurrency.events import wait_for_event
from tsx_runtime.core.scheduling.dispatcher import Dispatcher
from tsx_runtime.core.workers.forked import Starter
from tsx_runtime.core.workers.health import MEGA, Heartbeat, Recycling, Verdict
from tsx_runtime.core.workers.instance import (
    WorkerInstance,
    death_error,
    describe_exit,
    was_out_of_memory,
)
from tsx_runtime.core.workers.launch import Launch
from tsx_runtime.core.workers.signature import InputKinds, ModelSignature
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.errors import LoadFailed, LoadOutOfMemory

BACK_OFF_S = (0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)  # seconds
MAX_SAME_LOAD_ERRORS = 3
# Seconds until a worker that was given up is tried again; the last value repeats.
GIVEN_UP_PAUSES_S = (60, 120, 300, 600)
MIN_HEALTHY_S = (
    60.0  # The back-off starts again after a process that ran this long, even without a request.
)
REPLACE_RETRY_S = 30.0  # pause until the next attempt to replace a worker
NOT_NEEDED = "it is no longer needed"

logger = logging.getLogger("tsx.supervisor")


@dataclass(eq=False)
class SupervisionConfig:
    """The supervision of one version's workers: its settings, and the state that they share.

    Timeouts are in seconds.
    """

    label: str
    retry_hint: str  # advice to users if workers were given up
    dispatcher: Dispatcher
    starter: Starter
    # The load order is made for each start, since threads depend on the number of workers.
    order: Callable[[Worker], wire.LoadOrder]
    launch: Callable[[Worker], Launch | None]  # It returns None if the worker can be forked.
    response_timeout: float
    startup_timeout: float
    max_retry_timeout: float
    recycling: Recycling
    heartbeat: float
    heartbeat_timeout: float
    # The context in which a process loads the model.
    reserve_memory: Callable[[Worker], AbstractAsyncContextManager[None]] = lambda worker: (
        nullcontext()
    )
    on_state: Callable[[], None] = lambda: None  # It is called when a worker's state has changed.
    must_load: bool = False  # whether a failure ends the program, which then reports it
    last_error: str | None = None
    # The last logged failure to load the model; None after a success.
    logged_failure: str | None = None
    # The last logged form, and the reasons against other forms.
    logged_form: tuple[str, ...] = ()
    load_seconds: float | None = None  # duration of the last load
    signature: ModelSignature | None = None  # reported by the last load
    monitor_fields: InputKinds = field(default_factory=dict)  # reported with it
    # Whether a worker is being replaced. Only one is at a time, to limit the additional memory.
    is_replacing: bool = False
    timeouts_changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set_timeouts(self, response: float, startup: float) -> None:
        """Change the timeouts, including those of running batches and starts."""
        self.response_timeout, self.startup_timeout = response, startup
        changed, self.timeouts_changed = self.timeouts_changed, asyncio.Event()
        changed.set()

    def note_error(self, message: str, trace: str | None = None) -> None:
        self.last_error = f"{message}\n\n{trace}" if trace else message
        self.dispatcher.stats.error_log.add_error(message, trace or "")

    def log_form(self, form: str | None, passed_over: tuple[str, ...]) -> None:
        """Log the form of a worker, once for all workers that use the same one."""
        if form is None or (form, *passed_over) == self.logged_form:
            return
        self.logged_form = (form, *passed_over)
        name = "the archive's own model" if form == REFERENCE else f"the form {form}"
        if passed_over:
            logger.warning(
                "%s: the model runs as %s; forms that are not used: %s",
                self.label,
                name,
                "; ".join(passed_over),
            )
        else:
            logger.info("%s: the model runs as %s", self.label, name)

    def set_state(self, worker: Worker, state: WorkerState) -> None:
        worker.state, worker.since = state, time.monotonic()
        self.on_state()


class WorkerLifecycle:
    """The lifecycle of a worker; `run` returns when the worker is stopped."""

    def __init__(self, worker: Worker, config: SupervisionConfig) -> None:
        self._worker = worker
        self._config = config

    async def run(self) -> None:
        errors: list[str] = []
        back_offs, pauses = iter(BACK_OFF_S), iter(GIVEN_UP_PAUSES_S)
        total_pause = 0.0
        while not self._worker.stopping.is_set():
            was_useful = await self._serve_once(errors)
            if self._worker.stopping.is_set():
                return
            if was_useful:
                back_offs, pauses, total_pause = iter(BACK_OFF_S), iter(GIVEN_UP_PAUSES_S), 0.0
            pause, state = next(back_offs, BACK_OFF_S[-1]), WorkerState.BACKING_OFF
            total_pause += pause
            is_same_error = (
                len(errors) >= MAX_SAME_LOAD_ERRORS
                and len(set(errors[-MAX_SAME_LOAD_ERRORS:])) == 1
            )
            if (
                self._worker.given_up
                or total_pause > self._config.max_retry_timeout
                or is_same_error
            ):
                pause, state = next(pauses, GIVEN_UP_PAUSES_S[-1]), WorkerState.FAILED
                self._worker.given_up = True
                text = (
                    "%s: worker %s is given up and tried again in %d s; the last error is in its"
                    " description. To try again at once: %s"
                )
                logger.error(
                    text, self._config.label, self._worker.id, pause, self._config.retry_hint
                )
            self._worker.next_start = time.monotonic() + pause
            self._config.set_state(self._worker, state)
            await wait_for_event(self._worker.stopping, pause)
            if not self._worker.stopping.is_set():
                self._count_restart()

    def _count_restart(self) -> None:
        self._worker.restarts += 1
        self._config.dispatcher.stats.restarts += 1

    async def _serve_once(self, errors: list[str]) -> bool:
        """Run a process from start to end, and then its successors.

        Returns:
            Whether the last process answered a request or ran for a minute.
        """
        self._config.set_state(self._worker, WorkerState.LOADING)
        self._worker.started = datetime.now(timezone.utc)
        instance: WorkerInstance | None = None
        try:
            async with self._config.reserve_memory(self._worker):
                self._worker.instance = instance = await self._begin()
                if self._worker.stopping.is_set():
                    instance.kill(NOT_NEEDED)
                await instance.load(self._config.order(self._worker), self._config.startup_timeout)
                self._config.signature = instance.signature
                self._config.monitor_fields = instance.monitor_fields
        except (LoadFailed, EOFError, OSError, TimeoutError, asyncio.TimeoutError) as error:
            if instance is None:
                # The model is not the cause, and the next attempt may succeed.
                self._note_failure(_cannot_start(error), [])
            else:
                self._note_failure(await self._end_failed_load(instance, error), errors)
            return False
        errors.clear()
        current: WorkerInstance | None = instance
        while current is not None:
            instance = current
            self._take_over(instance)
            current = await self._wait_for_end_or_successor(instance)
        return instance.channel.answered > 0 or instance.age > MIN_HEALTHY_S

    async def _begin(self) -> WorkerInstance:
        name, launch = f"{self._config.label} {self._worker.id}", self._config.launch(self._worker)
        instance = await WorkerInstance.start(
            self._config.starter, self._config.dispatcher, name, launch
        )
        instance.channel.worker, instance.channel.devices = (
            self._worker.id,
            self._worker.gpus or (None,),
        )
        return instance

    def _take_over(self, instance: WorkerInstance) -> None:
        if self._worker.stopping.is_set():
            return
        self._worker.instance = instance
        self._worker.given_up = self._config.must_load = False
        self._config.logged_failure = None
        self._config.load_seconds = instance.load_seconds
        self._config.set_state(self._worker, WorkerState.READY)
        ready = "%s: worker %s (pid %s) is ready on %s after %.2f s"
        logger.info(
            ready,
            self._config.label,
            self._worker.id,
            instance.pid,
            instance.device,
            instance.load_seconds,
        )
        self._config.log_form(instance.form, instance.forms_passed_over)
        self._config.dispatcher.add(instance.channel)
        if instance.loaded_memory >= self._config.recycling.memory * MEGA > 0:
            text = (
                "%s: worker %s uses %d MB after it has loaded the model, more than maxWorkerMemory,"
                " which is %d: raise maxWorkerMemory"
            )
            logger.warning(
                text,
                self._config.label,
                self._worker.id,
                instance.loaded_memory // MEGA,
                self._config.recycling.memory,
            )
        self._worker.settle(None)

    async def _wait_for_end_or_successor(self, instance: WorkerInstance) -> WorkerInstance | None:
        """Wait until a process has ended, or return its successor once that is loaded."""
        end = asyncio.create_task(self._wait_for_end(instance))
        while True:
            due_task = asyncio.ensure_future(instance.replacement_due.wait())
            await asyncio.wait([end, due_task], return_when=asyncio.FIRST_COMPLETED)
            due_task.cancel()
            successor = (
                None
                if end.done() or self._worker.stopping.is_set()
                else await self._start_successor(instance)
            )
            if successor is not None:
                self._worker.retiring[instance] = asyncio.create_task(self._retire(instance, end))
                return successor
            if end.done() or self._worker.stopping.is_set():
                await end
                return None

    async def _wait_for_end(self, instance: WorkerInstance) -> None:
        watch_tasks = [
            asyncio.create_task(self._restart_on_error(watch, instance))
            for watch in (self._watch_response, self._watch_health)
        ]
        channel = instance.channel
        await channel.closed
        for watch in watch_tasks:
            watch.cancel()
        code = await instance.exit_code()
        lost = channel.sent.popleft() if channel.sent else None
        if lost or not (self._worker.stopping.is_set() or instance is not self._worker.instance):
            cause = instance.kill_reason or describe_exit(code)
            self._config.note_error(f"worker {self._worker.id} (pid {instance.pid}) ended: {cause}")
            logger.error("%s: %s", self._config.label, self._config.last_error)
        if lost is None:
            return
        error = death_error(instance, code, lost, stopping=self._worker.stopping.is_set())
        if instance.stuck and lost.deaths == 0:
            self._config.dispatcher.requeue(lost, channel.streaming, error)
        # The supervision killed it, after a timeout or at the end.
        elif instance.kill_reason and not instance.stuck and not instance.closed_early:
            self._config.dispatcher.refuse_all(lost.jobs, error)
        else:
            self._config.dispatcher.retry_lost(lost, channel.streaming, error)

    async def _restart_on_error(
        self, watch: Callable[[WorkerInstance], Awaitable[None]], instance: WorkerInstance
    ) -> None:
        """Run a watch, and restart it after an error: nothing else would kill a hanging worker."""
        while True:
            try:
                return await watch(instance)
            except Exception:  # The task must continue after any error.
                logger.exception(
                    "%s: watching worker %s failed and is restarted",
                    self._config.label,
                    self._worker.id,
                )
                await asyncio.sleep(self._config.heartbeat)

    async def _watch_response(self, instance: WorkerInstance) -> None:
        """Kill the worker if its batch takes too long.

        This wakes up once per timeout instead of once per batch.
        """
        while True:
            remaining_s = self._config.response_timeout
            if not remaining_s:  # With a timeout of 0, workers get no requests.
                await self._config.timeouts_changed.wait()
                continue
            if instance.channel.sent and not instance.channel.is_paused:
                remaining_s += instance.channel.began - time.monotonic()
            if remaining_s <= 0:
                instance.kill(
                    f"it did not answer within {self._config.response_timeout:g} s"
                    " (responseTimeout)"
                )
                return
            await wait_for_event(self._config.timeouts_changed, remaining_s)

    async def _watch_health(self, instance: WorkerInstance) -> None:
        """Kill the worker if it is stuck, and note when it is due to be replaced."""
        heartbeat = Heartbeat(self._config.heartbeat, self._config.heartbeat_timeout)
        channel = instance.channel
        while True:
            await asyncio.sleep(self._config.heartbeat)
            stopped, busy = instance.is_stopped(), bool(channel.sent)
            # While a client is slow, nothing is read from the worker, not even answers to pings.
            pings = 0 if channel.is_paused else channel.pings
            verdict = heartbeat.check(
                stopped=stopped, busy=busy, answered=channel.answered, pings=pings
            )
            if verdict is Verdict.ASK:
                channel.ping()
            elif verdict is Verdict.STOPPED:
                self._kill_stuck(instance, "stopped", "its process was stopped (SIGSTOP)")
            elif verdict is Verdict.SILENT:
                self._kill_stuck(
                    instance,
                    "silent",
                    f"it sent no heartbeat for {self._config.heartbeat_timeout:g} s"
                    " (heartbeat_timeout)",
                )
            if reason := self._reason_to_recycle(instance):
                instance.reason = reason
                instance.replacement_due.set()

    def _kill_stuck(self, instance: WorkerInstance, kind: str, reason: str) -> None:
        self._config.dispatcher.stats.stuck[kind] += 1
        instance.kill(reason, stuck=True)

    # Replacement by a successor

    def _reason_to_recycle(self, instance: WorkerInstance) -> str | None:
        if self._config.is_replacing or time.monotonic() < instance.next_replacement_at:
            return None
        if (
            instance.cores is not None
            and instance.cores != self._config.order(self._worker)["cores"]
        ):
            # The number of workers has changed since the start, and so have the cores of each.
            return "cores"
        limits = self._config.recycling
        # Otherwise each successor would be due for replacement at once.
        if instance.loaded_memory >= limits.memory * MEGA:
            limits = limits._replace(memory=0)
        memory = instance.memory() if limits.memory else 0
        return limits.reason(
            instance.jitter, requests=instance.channel.answered, memory=memory, age=instance.age
        )

    async def _start_successor(self, instance: WorkerInstance) -> WorkerInstance | None:
        """Load the model in a new process while the old one serves.

        Returns:
            The new process, or None if the old one continues.
        """
        instance.replacement_due.clear()
        if self._config.is_replacing:  # Another worker is already being replaced.
            return None
        self._config.is_replacing = True
        try:
            async with self._config.reserve_memory(self._worker):
                successor = self._worker.successor = await self._begin()
                if self._worker.stopping.is_set():
                    successor.kill(NOT_NEEDED)
                await successor.load(self._config.order(self._worker), self._config.startup_timeout)
        except (LoadFailed, EOFError, OSError, TimeoutError, asyncio.TimeoutError) as error:
            await self._postpone_replacement(instance, error)
            return None
        finally:
            self._config.is_replacing, self._worker.successor = False, None
        if instance.channel.closed.done():  # It died meanwhile, which does not count as recycling.
            self._count_restart()
            return successor
        text = "%s: worker %s (pid %s) has reached its limit of %s; pid %s takes over"
        logger.info(
            text, self._config.label, self._worker.id, instance.pid, instance.reason, successor.pid
        )
        self._config.dispatcher.stats.recycled[instance.reason] += 1
        self._worker.started = datetime.now(timezone.utc)
        return successor

    async def _postpone_replacement(self, instance: WorkerInstance, error: Exception) -> None:
        """Record that a successor failed; the old process serves until the next attempt."""
        if self._worker.successor is not None:
            failure = await self._end_failed_load(self._worker.successor, error)
        else:
            failure = _cannot_start(error)
        if self._worker.stopping.is_set():
            return
        self._config.note_error(failure.message, failure.traceback)
        text = (
            "%s: worker %s (pid %s) has reached its limit of %s but continues, since no other"
            " worker could take over: %s"
        )
        logger.error(
            text,
            self._config.label,
            self._worker.id,
            instance.pid,
            instance.reason,
            _with_outline(failure),
        )
        instance.next_replacement_at = time.monotonic() + REPLACE_RETRY_S

    async def _retire(self, instance: WorkerInstance, end: asyncio.Task[None]) -> None:
        """Drain a process that has a successor, then end it."""
        try:
            await self._config.dispatcher.release(instance.channel)
            instance.channel.close()
            await end
        finally:
            del self._worker.retiring[instance]

    async def _end_failed_load(self, instance: WorkerInstance, error: Exception) -> LoadFailed:
        """End a process that has not loaded the model, and return the error."""
        instance.channel.close()
        if isinstance(error, TimeoutError | asyncio.TimeoutError) or (
            isinstance(error, LoadFailed) and instance.process.exit_grace
        ):
            # The other ranks of a group would wait forever for the failed one.
            instance.process.kill()
        code = await instance.exit_code()
        if isinstance(error, LoadFailed):
            return error
        if isinstance(error, EOFError):
            kind = (
                LoadOutOfMemory
                if instance.kill_reason is None and was_out_of_memory(code)
                else LoadFailed
            )
            return kind(
                "the worker ended while it loaded the model:"
                f" {instance.kill_reason or describe_exit(code)}"
            )
        return LoadFailed(
            f"the model was not loaded within {self._config.startup_timeout:g} s; raise"
            " startupTimeout if it needs longer"
        )

    def _note_failure(self, failure: LoadFailed, errors: list[str]) -> None:
        errors.append(failure.message)
        if self._worker.stopping.is_set():
            return
        self._config.note_error(failure.message, failure.traceback)
        if failure.message != self._config.logged_failure and not self._config.must_load:
            text = "%s: worker %s could not load the model: %s"
            logger.error(text, self._config.label, self._worker.id, _with_outline(failure))
        self._config.logged_failure = failure.message
        self._worker.settle(failure)


def _with_outline(failure: LoadFailed) -> str:
    return f"{failure.message}\n{failure.outline}" if failure.outline else failure.message


def _cannot_start(error: Exception) -> LoadFailed:
    """Return the error for a process that could not be started."""
    if isinstance(error, LoadFailed):  # There is not enough memory.
        return error
    return LoadFailed(f"its process could not be started: {error!r}")
