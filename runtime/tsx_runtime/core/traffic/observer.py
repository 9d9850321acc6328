"""Observers of requests: what an observer makes of a client's job (an `ObservedJob`) stands in the queue in its place."""

from __future__ import annotations

from typing import Protocol

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Job


class Observer(Protocol):
    """Sees some of the requests that a splitter sends on, with their answers."""

    def wants(self, draw: float) -> bool:
        """`draw` is random, from 0 up to but not including 1, and another one for each observer."""

    def watch(self, job: Job, version: ModelVersion) -> Job:
        """What is submitted to the version in the job's place."""
