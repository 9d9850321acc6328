"""The splitter, which picks a version for each request of a model.

It replaces the version as the route of a model whose requests are split, copied or recorded. The
requests of other models go directly to their default version.
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

VERSION_HEADER = b"x-tsx-model-version"  # header of responses: the version that a splitter chose


class Observer(Protocol):
    """A listener to some of a splitter's requests and their responses."""

    def should_observe(self, draw: float) -> bool:
        """Tell whether to observe a request; `draw` is random in [0, 1) for each observer."""

    def wrap_job(self, job: Job, version: ModelVersion) -> Job:
        """Return the job to submit in place of `job`, such as an `ObservedJob`."""


class Splitter:
    """The distribution of one model's requests among its versions."""

    client_timeout = 0.0  # Each version has a timeout of its own.

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
        """Use a table from now on; `versions` are all registered ones."""
        self.table = table
        self.versions = dict(versions)
        self._version_headers = {
            number: b"%b: %b\r\n" % (VERSION_HEADER, number.encode()) for number in versions
        }
        self._stateful = [
            version for version in versions.values() if version.plan.strategy.sequences is not None
        ]
        self._fixed = {}

    def route_for_headers(self, headers: Headers) -> Splitter | FixedRoute:
        """Return the route for a request's headers, or the splitter if its body decides."""
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
        """Submit a job to the version of its body's key, or to a random one."""
        table = self.table
        key = key_in_body(table, job.body) if table.by else None
        number = draw(table, self._draw()) if key is None else pick_sticky(table, key)
        self.send(job, self.versions[number])

    def send(self, job: Job, version: ModelVersion) -> None:
        """Submit a job to a version, or to the one that has the job's sequence."""
        if self._stateful:
            version = next(
                (stateful for stateful in self._stateful if stateful.has_sequence_of(job)), version
            )
        if version.client_timeout:
            due = job.arrived + version.client_timeout
            job.deadline = due if job.deadline is None else min(due, job.deadline)
        header = self._version_headers.get(version.version)
        # The version was removed or replaced after the head of the request was read.
        if header is None:
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
            if observer.should_observe(self._draw()):
                watched = observer.wrap_job(watched, version)
        if watched is not job:
            job.watched = watched


class FixedRoute:
    """The route of requests whose headers have chosen the version."""

    client_timeout = 0.0

    def __init__(self, splitter: Splitter, version: ModelVersion) -> None:
        self.name = splitter.name
        self.version = version
        self._send = splitter.send
        self.leave = splitter.leave

    def route_for_headers(self, headers: Headers) -> FixedRoute:
        return self

    def submit(self, job: Job) -> None:
        self._send(job, self.version)
