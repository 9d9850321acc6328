"""A worker as the rest of the server sees it: one id for all its processes."""

from __future__ import annotations

import asyncio
import enum
from datetime import datetime, timezone

from tsx_runtime.core.scheduling.channel import Channel
from tsx_runtime.core.workers.instance import ResourceUsage, WorkerInstance
from tsx_runtime.errors import TsxError


class WorkerState(enum.Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    BACKING_OFF = "BACKING_OFF"
    FAILED = "FAILED"


class Worker:
    """A worker of a version, with all the processes that it has had."""

    def __init__(self, id: str, gpus: tuple[int, ...], now: float) -> None:
        self.id = id
        self.gpus = gpus  # numbers of the server's GPUs; empty on a CPU
        self.state = WorkerState.LOADING
        self.started = datetime.now(timezone.utc)
        self.since = now  # time.monotonic() of the last change of `state`
        # time.monotonic() of the next start, while the worker backs off or is given up.
        self.next_start = 0.0
        self.restarts = 0
        self.given_up = False  # whether it failed too often, and has not loaded the model since
        self.instance: WorkerInstance | None = None
        self.successor: WorkerInstance | None = None  # It loads while `instance` serves.
        # Processes that have a successor, and still finish their work.
        self.retiring: dict[WorkerInstance, asyncio.Task[None]] = {}
        self.settled: asyncio.Future[TsxError | None] = asyncio.get_running_loop().create_future()
        self.stopping = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def gpu_id(self) -> int | None:
        """The first GPU, or None on a CPU."""
        return self.gpus[0] if self.gpus else None

    @property
    def pid(self) -> int | None:
        return self.instance.pid if self.instance else None

    @property
    def channel(self) -> Channel | None:
        return self.instance.channel if self.instance else None

    @property
    def load_seconds(self) -> float | None:
        return self.instance.load_seconds if self.instance else None

    @property
    def device(self) -> str | None:
        return self.instance.device if self.instance else None

    @property
    def input(self) -> str | None:
        return self.instance.input if self.instance else None

    @property
    def example(self) -> bool:
        return self.instance is not None and self.instance.example

    @property
    def form(self) -> str | None:
        return self.instance.form if self.instance else None

    @property
    def forms_passed_over(self) -> tuple[str, ...]:
        return self.instance.forms_passed_over if self.instance else ()

    def seconds_until_ready(self, now: float, last_load_seconds: float | None) -> float | None:
        """Estimate the seconds until it serves; None if it is not being started.

        `last_load_seconds` is the last load time of this model, or None. Without it, or after it,
        the remaining time is assumed to equal the elapsed time.
        """
        if self.state is WorkerState.READY:
            return 0.0
        if self.state is WorkerState.BACKING_OFF:
            return max(0.0, self.next_start - now) + (last_load_seconds or 0.0)
        if self.state is WorkerState.LOADING:
            elapsed = now - self.since
            return (
                last_load_seconds - elapsed
                if last_load_seconds is not None and last_load_seconds > elapsed
                else elapsed
            )
        return None

    def settle(self, error: TsxError | None) -> None:
        """Report to waiting tasks that it serves, or an error; only the first call counts."""
        if not self.settled.done():
            self.settled.set_result(error)

    def memory(self) -> int:
        """Return its resident bytes, or 0 without a process; any thread may call it."""
        return self.instance.memory() if self.instance else 0

    def usage(self) -> ResourceUsage | None:
        """Return its resource usage, or None without a process; any thread may call it."""
        return self.instance.usage() if self.instance else None

    def kill(self, reason: str) -> None:
        """Kill the serving process and its successor; retiring processes end by themselves."""
        for instance in (self.instance, self.successor):
            if instance is not None:
                instance.kill(reason)
