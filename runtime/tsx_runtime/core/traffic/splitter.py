"""The splitter replaces a version for a model whose requests are split, copied or recorded: it
picks a version for each request.

A model without traffic settings has none: its requests go directly to its default version.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Protocol

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Headers, Job
from tsx_runtime.core.traffic.routing import (
    Table,
    by_rule,
    draw,
    key_in_body,
    key_in_head,
    pick_sticky,
)

HEADER = b"x-tsx-model-version"  # of answers that came through a splitter: the version


class Observer(Protocol):
    """Sees some of the requests that a splitter sends on, with their answers."""

    def wants(self, draw: float) -> bool:
        """`draw` is random, from 0 up to but not including 1, and another one for each observer."""

    def watch(self, job: Job, version: ModelVersion) -> Job:
        """What is submitted to the version in the job's place, such as an `ObservedJob`."""


class Splitter:
    """Distributes the requests of one model among its versions."""

    client_timeout = 0.0  # each version has its own

    def __init__(self, name: str, draw: Callable[[], float] = random.random) -> None:
        self.name = name
        self.observers: list[Observer] = []
        self.table = Table(name, "")
        self._draw = draw
        self.versions: dict[str, ModelVersion] = {}
        self._version_headers: dict[str, bytes] = {}
        self._stateful: list[ModelVersion] = []
        self._fixed: dict[str, FixedRoute] = {}

    def set(self, table: Table, versions: Mapping[str, ModelVersion]) -> None:
        """From now on; `versions` are all that are registered."""
        self.table = table
        self.versions = dict(versions)
        self._version_headers = {
            number: b"%b: %b\r\n" % (HEADER, number.encode()) for number in versions
        }
        self._stateful = [
            version for version in versions.values() if version.plan.strategy.sequences is not None
        ]
        self._fixed = {}

    def by_head(self, headers: Headers) -> Splitter | FixedRoute:
        table = self.table
        number = by_rule(table, headers)
        if number is None:
            key = key_in_head(table, headers) if table.key else None
            if key is None:
                return self
            number = pick_sticky(table, key)
        fixed = self._fixed.get(number)
        if fixed is None:
            fixed = self._fixed[number] = FixedRoute(self, self.versions[number])
        return fixed

    def submit(self, job: Job) -> None:
        table = self.table
        key = key_in_body(table, job.body) if table.by else None
        number = draw(table, self._draw()) if key is None else pick_sticky(table, key)
        self.send(job, self.versions[number])

    def send(self, job: Job, version: ModelVersion) -> None:
        if (
            self._stateful
        ):  # a sequence stays with the version that has it, however the shares are now
            version = next(
                (other for other in self._stateful if other.has_sequence_of(job)), version
            )
        if version.client_timeout:
            due = job.arrived + version.client_timeout
            job.deadline = due if job.deadline is None else min(due, job.deadline)
        header = self._version_headers.get(version.version)
        if (
            header is None
        ):  # it was removed, or another has taken its place, since the request's head was read
            version = self.versions[self.table.default]
            header = self._version_headers[version.version]
        job.route(version, header)
        if self.observers:
            self._watch(job, version)
        version.submit(job.watched or job)

    def leave(self, job: Job) -> None:
        if job.routed is not None:
            job.routed.leave(job.watched or job)

    def _watch(self, job: Job, version: ModelVersion) -> None:
        watched = job
        for observer in self.observers:
            if observer.wants(self._draw()):
                watched = observer.watch(watched, version)
        if watched is not job:
            job.watched = watched


class FixedRoute:
    """The route of requests whose head has decided already."""

    client_timeout = 0.0

    def __init__(self, split: Splitter, version: ModelVersion) -> None:
        self.name = split.name
        self.version = version
        self._send = split.send
        self.leave = split.leave

    def by_head(self, headers: Headers) -> FixedRoute:
        return self

    def submit(self, job: Job) -> None:
        self._send(job, self.version)
