"""One process of a worker and its channel, from the start to the end."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from typing import NamedTuple

import psutil

from tsx_runtime import wire
from tsx_runtime.core.scheduling.channel import Channel, Owner, SentBatch
from tsx_runtime.core.workers.forked import Process, Starter
from tsx_runtime.core.workers.launch import Launch
from tsx_runtime.errors import OutOfResources, TsxError, WorkerDied

EXIT_GRACE = 5.0  # seconds that a worker may take to end after its socket was closed
UNHEARD_GRACE = 0.5  # that one may which closed it while requests wait for its answer


class ResourceUsage(NamedTuple):
    """The resource usage of a worker, summed over its processes."""

    pids: tuple[int, ...]
    memory: int  # resident bytes
    cpu_seconds: float
    descriptors: int


class WorkerInstance:
    """A worker has one at a time, or two while one takes over from the other."""

    def __init__(self, process: Process, channel: Channel, began: float) -> None:
        self.process = process
        self.channel = channel
        self.began = began
        self.load_seconds: float | None = (
            None  # with the start of its process, and of the fork server where it was the first
        )
        self.model_seconds = 0.0  # of these, after the start
        self.device: str | None = (
            None  # what the loaded model runs on, by its own account: cpu, cuda:0
        )
        self.input: str | None = (
            None  # what the handler takes, where it says so: image, text, json, file, chat
        )
        self.example = False  # whether the handler's description has an example of a request
        self.form: str | None = None  # which of the configured `forms` the model has
        self.forms_passed_over: tuple[str, ...] = ()  # for each form before it, why it is not used
        self.cores: list[int] | None = None  # that it was pinned to
        self.loaded_memory = 0  # bytes, when the model was loaded
        self.killed_because: str | None = None
        self.stuck = False  # it was killed although its requests had done nothing wrong
        self.unheard = (
            False  # it was killed because it had closed its connection: as good as dead before
        )
        self.early = random.random()  # of the jitter in its recycling
        self.due = asyncio.Event()  # to be replaced, for `reason`
        self.reason = ""
        self.not_before = 0.0  # time.monotonic() of the next attempt, when one has failed
        self.ended = asyncio.create_task(self._watch_process())

    @classmethod
    async def start(
        cls, starter: Starter, owner: Owner, name: str, launch: Launch | None = None
    ) -> WorkerInstance:
        """Raises OSError or EOFError when there is no process to be had."""
        began = time.monotonic()
        process, sock = await starter.start(name, launch)
        channel = owner.new_channel()
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)
        return cls(process, channel, began)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def age(self) -> float:
        return time.monotonic() - self.began

    async def load(self, order: wire.LoadOrder, timeout: float) -> None:
        """Raises LoadError (the worker's own report), EOFError (it ended), TimeoutError."""
        started = self.age
        self.channel.load(order)
        self.cores = order["cores"]
        facts = await asyncio.wait_for(asyncio.shield(self.channel.loaded), timeout)
        self.load_seconds, self.device = self.age, str(facts["device"])
        self.model_seconds = self.load_seconds - started
        self.input, self.example = facts.get("input"), facts.get("example") is True
        self.form, self.forms_passed_over = (
            facts.get("form"),
            tuple(map(str, facts.get("forms_passed_over", ()))),
        )
        self.loaded_memory = self.memory()

    def kill(self, because: str, *, stuck: bool = False) -> None:
        self.killed_because = because
        self.stuck = stuck
        self.process.kill()

    async def exit_code(self) -> int | None:
        """How the process ended, once its channel is closed.

        A thread that the handler left behind would keep it alive, unheard.
        """
        late = await self._is_late(
            self.process.unheard_grace or UNHEARD_GRACE if self.channel.sent else EXIT_GRACE
        )
        if (
            late and not self.memory()
        ):  # it has given that back: only its files and devices are still being closed
            late = await self._is_late(EXIT_GRACE)
        if late:
            self.unheard = self.killed_because is None
            self.kill(
                self.killed_because or "it closed its connection to the server, but did not exit"
            )
        return await self.ended

    async def _is_late(self, grace: float) -> bool:
        _, late = await asyncio.wait([self.ended], timeout=grace)
        return bool(late)

    def memory(self) -> int:
        """Resident bytes; 0 where there is no process."""
        try:
            return (
                sum(int(each.memory_info().rss) for each in self.process.members())
                if self.process.alive
                else 0
            )
        except (psutil.Error, OSError):  # it has gone, or there is no descriptor to look with
            return 0

    def usage(self) -> ResourceUsage | None:
        """None where there is no process. To be called from any thread."""
        try:
            members = self.process.members() if self.process.alive else ()
            each = [
                (member.pid, member.memory_info().rss, member.cpu_times(), _descriptors(member))
                for member in members
            ]
        except (psutil.Error, OSError):  # it has gone, or there is no descriptor to look with
            return None
        if not each:
            return None
        pids, memory, times, descriptors = zip(*each, strict=True)
        return ResourceUsage(
            pids, sum(memory), sum(spent.user + spent.system for spent in times), sum(descriptors)
        )

    def is_stopped(self) -> bool:
        """Whether a SIGSTOP holds the process. A debugger that does is there on purpose."""
        try:
            return self.process.alive and any(
                each.status() == psutil.STATUS_STOPPED for each in self.process.members()
            )
        except (psutil.Error, OSError):  # it has gone, or there is no descriptor to look with
            return False

    async def _watch_process(self) -> int | None:
        """A child of the worker may hold the socket open after the worker's end; then the channel
        is closed from here.
        """
        code = await self.process.ended()
        await asyncio.wait([self.channel.closed], timeout=1.0)
        self.channel.abort()
        return code


def _descriptors(process: psutil.Process) -> int:
    return process.num_fds() if hasattr(process, "num_fds") else 0  # Windows has handles


def describe_exit(code: int | None) -> str:
    """A process's end in words."""
    if code is None:
        return "exit code unknown, because the fork server had already exited"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = "; the system may have been out of memory" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def was_out_of_memory(code: int | None) -> bool:
    """Whether the system ended the process as it does where memory runs out."""
    return code in (-signal.SIGKILL, 137)


def death(
    instance: WorkerInstance, code: int | None, lost: SentBatch, *, stopping: bool
) -> TsxError:
    """What is said of a request with which a worker died: TorchServe's first words, which its
    clients look for, then why and what now.
    """
    because = instance.killed_because
    if because is None and was_out_of_memory(code):
        return OutOfResources(
            "Out of resources: the worker was killed, as the system does when memory runs out."
            " Worker died."
        )
    now = "" if stopping else " A new worker is started; send the request again."
    if lost.deaths > 0:
        now = (
            " The request was retried without the others of its batch, and a worker died again:"
            " this request is the cause."
        )
    return WorkerDied(f"Worker died. Cause: {because or describe_exit(code)}.{now}")
