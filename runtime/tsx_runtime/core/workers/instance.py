"""One process of a worker and its channel, from start to end."""

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

EXIT_GRACE_S = 5.0  # limit of a worker's end after its socket was closed
UNHEARD_GRACE_S = 0.5  # while requests wait for the answer of a worker that closed it


class ResourceUsage(NamedTuple):
    """The resource usage of a worker, summed over its processes."""

    pids: tuple[int, ...]
    memory: int  # resident bytes
    cpu_seconds: float
    descriptors: int


class WorkerInstance:
    """A process of a worker. A worker has one, or two while a successor takes over."""

    def __init__(self, process: Process, channel: Channel, began: float) -> None:
        self.process = process
        self.channel = channel
        self.began = began
        # Seconds, including the start of the process, and of the fork server for the first one.
        self.load_seconds: float | None = None
        self.model_seconds = 0.0  # the part of `load_seconds` after the start
        self.device: str | None = None  # reported by the worker: cpu, cuda:0
        # The handler's kind of input, if it reports one: image, text, json, file, chat.
        self.input: str | None = None
        self.example = False  # the handler's description has an example of a request
        self.form: str | None = None  # the one of the configured `forms` in use
        self.forms_passed_over: tuple[str, ...] = ()  # a reason for each form before `form`
        self.cores: list[int] | None = None  # CPU affinity
        self.loaded_memory = 0  # bytes after loading the model
        self.killed_because: str | None = None
        self.stuck = False  # It was killed, but not because of its requests.
        # It was killed after it had closed its connection, so it was already useless.
        self.unheard = False
        self.early = random.random()  # its part of the jitter in recycling
        self.due = asyncio.Event()  # set when it is to be replaced, for `reason`
        self.reason = ""
        self.not_before = 0.0  # time.monotonic() of the next attempt after a failed one
        self.ended = asyncio.create_task(self._watch_process())

    @classmethod
    async def start(
        cls, starter: Starter, owner: Owner, name: str, launch: Launch | None = None
    ) -> WorkerInstance:
        """Start a process.

        Raises:
            OSError, EOFError: No process can be started.
        """
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
        """Load the model.

        Raises:
            LoadFailed: The worker reported an error.
            EOFError: The worker ended.
            TimeoutError: Loading took too long.
        """
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
        """Wait for the process after its channel was closed, and return its exit code.

        A thread that the handler left running would keep the process alive; it is killed.
        """
        late = await self._is_late(
            self.process.unheard_grace or UNHEARD_GRACE_S if self.channel.sent else EXIT_GRACE_S
        )
        # A process without memory has ended, but its files and devices are still being closed.
        if late and not self.memory():
            late = await self._is_late(EXIT_GRACE_S)
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
        """Return its resident bytes, or 0 without a process."""
        try:
            return (
                sum(int(member.memory_info().rss) for member in self.process.members())
                if self.process.alive
                else 0
            )
        except (psutil.Error, OSError):  # It has ended, or descriptors are exhausted.
            return 0

    def usage(self) -> ResourceUsage | None:
        """Return its resource usage, or None without a process, in any thread."""
        try:
            members = self.process.members() if self.process.alive else ()
            rows = [
                (member.pid, member.memory_info().rss, member.cpu_times(), _descriptors(member))
                for member in members
            ]
        except (psutil.Error, OSError):  # It has ended, or descriptors are exhausted.
            return None
        if not rows:
            return None
        pids, memory, times, descriptors = zip(*rows, strict=True)
        return ResourceUsage(
            pids, sum(memory), sum(spent.user + spent.system for spent in times), sum(descriptors)
        )

    def is_stopped(self) -> bool:
        """Tell whether SIGSTOP holds the process; a debugger is not counted."""
        try:
            return self.process.alive and any(
                member.status() == psutil.STATUS_STOPPED for member in self.process.members()
            )
        except (psutil.Error, OSError):  # It has ended, or descriptors are exhausted.
            return False

    async def _watch_process(self) -> int | None:
        """Wait for the process's end and close the channel.

        A child of the worker may hold the socket open longer.
        """
        code = await self.process.ended()
        await asyncio.wait([self.channel.closed], timeout=1.0)
        self.channel.abort()
        return code


def _descriptors(process: psutil.Process) -> int:
    return process.num_fds() if hasattr(process, "num_fds") else 0  # Windows has handles.


def describe_exit(code: int | None) -> str:
    """Describe an exit code in words."""
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
    """Tell whether the process was ended like when the system runs out of memory."""
    return code in (-signal.SIGKILL, 137)


def death_error(
    instance: WorkerInstance, code: int | None, lost: SentBatch, *, stopping: bool
) -> TsxError:
    """Return the error for a request with which a worker died.

    It begins with TorchServe's words, which its clients look for, then gives cause and advice.
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
