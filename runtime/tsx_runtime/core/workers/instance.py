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
from tsx_runtime.core.workers.signature import (
    InputKinds,
    ModelSignature,
    read_monitor_fields,
    read_signature,
)
from tsx_runtime.errors import OutOfResources, TsxError, WorkerDied

EXIT_GRACE_S = 5.0  # limit for a worker to end after its socket was closed
UNANSWERED_EXIT_GRACE_S = 0.5  # shorter limit if it closed the socket with requests unanswered


class ResourceUsage(NamedTuple):
    """The resource usage of a worker, summed over its processes."""

    pids: tuple[int, ...]
    memory: int  # resident bytes
    cpu_seconds: float
    descriptors: int


class WorkerInstance:
    """A process of a worker. A worker has one, or two while a successor takes over."""

    def __init__(self, process: Process, channel: Channel, start_time: float) -> None:
        self.process = process
        self.channel = channel
        self.start_time = start_time
        # Seconds, including the start of the process; the first one includes that of the fork
        # server.
        self.load_seconds: float | None = None
        self.model_seconds = 0.0  # the part of `load_seconds` after the start of the process
        self.device: str | None = None  # reported by the worker, for example cuda:0
        # The handler's kind of input, if it reports one: image, text, json, file, chat.
        self.input: str | None = None
        self.example = False  # whether the handler's description has an example of a request
        self.signature: ModelSignature | None = None
        self.monitor_fields: InputKinds = {}  # reported by the handler, for monitoring
        self.form: str | None = None  # the form in use, one of the configured `forms`
        # Reasons why the forms before `form` are not used.
        self.forms_passed_over: tuple[str, ...] = ()
        self.cores: list[int] | None = None  # CPU affinity
        self.loaded_memory = 0  # bytes of memory after loading the model
        self.kill_reason: str | None = None
        self.stuck = False  # whether it was killed, but not because of its requests
        # Whether it was killed because it had closed its connection, but did not end.
        self.closed_early = False
        self.jitter = random.random()  # a number from 0 to 1, see `Recycling.reason`
        self.replacement_due = asyncio.Event()  # set when it should be replaced
        self.reason = ""
        self.next_replacement_at = 0.0  # time.monotonic() of the next attempt to replace it
        self.ended = asyncio.create_task(self._watch_process())

    @classmethod
    async def start(
        cls, starter: Starter, owner: Owner, name: str, launch: Launch | None = None
    ) -> WorkerInstance:
        """Start a process.

        Raises:
            OSError, EOFError: No process can be started.
        """
        start_time = time.monotonic()
        process, sock = await starter.start(name, launch)
        channel = owner.new_channel()
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)
        return cls(process, channel, start_time)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def age(self) -> float:
        return time.monotonic() - self.start_time

    async def load(self, order: wire.LoadOrder, timeout: float) -> None:
        """Load the model.

        Raises:
            LoadFailed: The worker reported an error.
            EOFError: The worker ended.
            TimeoutError: Loading took too long.
        """
        start_age = self.age
        self.channel.load(order)
        self.cores = order["cores"]
        facts = await asyncio.wait_for(asyncio.shield(self.channel.loaded), timeout)
        self.load_seconds, self.device = self.age, str(facts["device"])
        self.model_seconds = self.load_seconds - start_age
        self.input, self.example = facts.get("input"), facts.get("example") is True
        self.signature = read_signature(facts.get("signature"))
        self.monitor_fields = read_monitor_fields(facts.get("monitor_fields"))
        self.form, self.forms_passed_over = (
            facts.get("form"),
            tuple(map(str, facts.get("forms_passed_over", ()))),
        )
        self.loaded_memory = self.memory()

    def kill(self, reason: str, *, stuck: bool = False) -> None:
        self.kill_reason = reason
        self.stuck = stuck
        self.process.kill()

    async def exit_code(self) -> int | None:
        """Wait for the process after its channel was closed, and return its exit code.

        If a thread of the handler keeps the process alive, it is killed.
        """
        is_late = await self._is_late(
            self.process.exit_grace or UNANSWERED_EXIT_GRACE_S
            if self.channel.sent
            else EXIT_GRACE_S
        )
        # A process without memory is already ending: the system still closes its files and devices.
        if is_late and not self.memory():
            is_late = await self._is_late(EXIT_GRACE_S)
        if is_late:
            self.closed_early = self.kill_reason is None
            self.kill(
                self.kill_reason or "it closed its connection to the server, but did not exit"
            )
        return await self.ended

    async def _is_late(self, grace: float) -> bool:
        _, pending = await asyncio.wait([self.ended], timeout=grace)
        return bool(pending)

    def memory(self) -> int:
        """Return its resident bytes, or 0 without a process."""
        try:
            return (
                sum(int(member.memory_info().rss) for member in self.process.members())
                if self.process.alive
                else 0
            )
        except (psutil.Error, OSError):  # It has ended, or no descriptors are left.
            return 0

    def usage(self) -> ResourceUsage | None:
        """Return its resource usage, or None without a process; any thread may call it."""
        try:
            members = self.process.members() if self.process.alive else ()
            rows = [
                (member.pid, member.memory_info().rss, member.cpu_times(), _descriptors(member))
                for member in members
            ]
        except (psutil.Error, OSError):  # It has ended, or no descriptors are left.
            return None
        if not rows:
            return None
        pids, memory, times, descriptors = zip(*rows, strict=True)
        return ResourceUsage(
            pids,
            sum(memory),
            sum(cpu_times.user + cpu_times.system for cpu_times in times),
            sum(descriptors),
        )

    def is_stopped(self) -> bool:
        """Tell whether SIGSTOP stops the process; a stop by a debugger does not count."""
        try:
            return self.process.alive and any(
                member.status() == psutil.STATUS_STOPPED for member in self.process.members()
            )
        except (psutil.Error, OSError):  # It has ended, or no descriptors are left.
            return False

    async def _watch_process(self) -> int | None:
        """Wait for the process's end, then close the channel.

        A child of the worker may keep the socket open longer.
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
    """Tell whether the process was ended in the way of a system that is out of memory."""
    return code in (-signal.SIGKILL, 137)


def death_error(
    instance: WorkerInstance, code: int | None, lost: SentBatch, *, stopping: bool
) -> TsxError:
    """Return the error for a request with which a worker died.

    It begins with TorchServe's wording, which its clients check, then gives cause and advice.
    """
    cause = instance.kill_reason
    if cause is None and was_out_of_memory(code):
        return OutOfResources(
            "Out of resources: the worker was killed, as the system does when memory runs out."
            " Worker died."
        )
    advice = "" if stopping else " A new worker is started; send the request again."
    if lost.deaths > 0:
        advice = (
            " The request was retried without the others of its batch, and a worker died again:"
            " this request is the cause."
        )
    return WorkerDied(f"Worker died. Cause: {cause or describe_exit(code)}.{advice}")
