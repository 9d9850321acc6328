"""Resources that all versions of a server share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.core.models.plan import VersionPlan
from tsx_runtime.core.placement.placement import Machine
from tsx_runtime.core.slo.arbitration import DeviceArbiter
from tsx_runtime.core.workers.forked import Starter
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.plugins import BatchPolicy
from tsx_runtime.settings.schema import Settings


class ServerResources(NamedTuple):
    """Resources that all versions of this server share."""

    settings: Settings
    starter: Starter
    machine: Machine
    ids: Iterator[int]  # of workers
    gpus: int  # that this server uses
    choose_gpus: Callable[[VersionPlan], tuple[int, ...]]  # for one more worker
    batch_policies: Mapping[str, BatchPolicy]  # of plugins
    count_workers: Callable[[], int]  # of all versions
    room: Callable[
        [Any, Worker], AbstractAsyncContextManager[None]
    ]  # open while a process of the worker loads the model of a version
    background: TaskGroup
    arbiter: DeviceArbiter
    worker_output: str = ""  # see `LoadOrder.output`
