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
    """One worker of a version, over all the processes it has had."""

    def __init__(self, id: str, gpus: tuple[int, ...], now: float) -> None:
        self.id = id
        self.gpus = gpus  # as the server numbers them; empty on a CPU
        self.state = WorkerState.LOADING
        self.started = datetime.now(timezone.utc)
        self.since = now  # time.monotonic() when it came into its state
        # the same clock: where it backs off or was given up, when its next process is started
        self.next_start = 0.0
        self.restarts = 0
        self.given_up = False  # it failed too often, and has not loaded the model since
        self.instance: WorkerInstance | None = None
        self.successor: WorkerInstance | None = None  # it loads while `instance` serves
        self.retiring: dict[
            WorkerInstance, asyncio.Task[None]
        ] = {}  # a successor serves; they answer what they hold
        self.settled: asyncio.Future[TsxError | None] = asyncio.get_running_loop().create_future()
        self.stopping = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def gpu_id(self) -> int | None:
        """The first of its GPUs."""
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

    def seconds_until_ready(self, now: float, usual: float | None) -> float | None:
        """None where it is not on its way.

        `usual` is what a process of this model last took to load it, None before the first has:
        then, or where it takes longer than usual, as long again as it has taken.
        """
        if self.state is WorkerState.READY:
            return 0.0
        if self.state is WorkerState.BACKING_OFF:
            return max(0.0, self.next_start - now) + (usual or 0.0)
        if self.state is WorkerState.LOADING:
            taken = now - self.since
            return usual - taken if usual is not None and usual > taken else taken
        return None

    def settle(self, error: TsxError | None) -> None:
        """Tell its waiters that it serves, or why it does not. Only the first call counts."""
        if not self.settled.done():
            self.settled.set_result(error)

    def memory(self) -> int:
        """Resident bytes; 0 where there is no process. To be called from any thread."""
        return self.instance.memory() if self.instance else 0

    def usage(self) -> ResourceUsage | None:
        """None where there is no process. To be called from any thread."""
        return self.instance.usage() if self.instance else None

    def kill(self, because: str) -> None:
        """What serves, or is to serve. Processes that retire end by themselves."""
        for instance in (self.instance, self.successor):
            if instance is not None:
                instance.kill(because)
