"""The resources that all versions of a server share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.core.models.plan import VersionPlan
from tsx_runtime.core.placement.placement import Machine
from tsx_runtime.core.workers.forked import Starter
from tsx_runtime.feature import Feature
from tsx_runtime.plugins import BatchPolicy
from tsx_runtime.settings.schema import Settings


class ServerResources(NamedTuple):
    """The resources that all versions of this server share."""

    settings: Settings
    starter: Starter
    machine: Machine
    ids: Iterator[int]  # the ids of future workers
    gpus: int  # the number of GPUs in use
    choose_gpus: Callable[[VersionPlan], tuple[int, ...]]  # returns the GPUs of one more worker
    batch_policies: Mapping[str, BatchPolicy]  # plugins by name
    count_workers: Callable[[], int]  # returns the number of workers of all versions
    features: Sequence[Feature]
    background: TaskGroup
    worker_output: str = ""  # see `LoadOrder.output`
