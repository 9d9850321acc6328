"""The splitter of a model, which picks a version for each request.

If a model's requests are split, copied or recorded, the splitter is their route. The requests of
other models go directly to their default version.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Protocol

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Headers, Job
from tsx_runtime.core.traffic.routing import (
    Table,
    draw,
    key_in_body,
    key_in_head,
    pick_sticky,
    version_by_rule,
)

VERSION_HEADER = b"x-tsx-model-version"  # a response header with the version that a splitter chose


class Observer(Protocol):
    """An observer of some of a splitter's requests and their responses."""

    def should_observe(self, draw: float) -> bool:
        """Tell whether to observe a request; `draw` is random in [0, 1).

        All observers of a request get the same number. The requests of a smaller share are
        therefore a part of those of a larger one.
        """

    def wrap_job(self, job: Job, version: ModelVersion) -> Job:
        """Return the job to submit in place of `job`, such as an `ObservedJob`."""


class Splitter:
    """Divides one model's requests among its versions."""

    client_timeout = 0.0  # Each version has its own timeout.

    def __init__(self, name: str, draw: Callable[[], float] = random.random) -> None:
        self.name = name
        self.observers: list[Observer] = []
        self.table = Table(name, "")
        self._draw = draw
        self.versions: dict[str, ModelVersion] = {}
        self._version_headers: dict[str, bytes] = {}
        self._stateful: list[ModelVersion] = []
        self._fixed_routes: dict[str, FixedRoute] = {}

    def set(self, table: Table, versions: Mapping[str, ModelVersion]) -> None:
        """Use a table from now on; `versions` are all registered versions."""
        self.table = table
        self.versions = dict(versions)
        self._version_headers = {
            number: b"%b: %b\r\n" % (VERSION_HEADER, number.encode()) for number in versions
        }
        self._stateful = [
            version for version in versions.values() if version.plan.strategy.sequences is not None
        ]
        self._fixed_routes = {}

    def route_for_headers(self, headers: Headers) -> Splitter | FixedRoute:
        """Return the route for a request's headers; it is the splitter if the body decides."""
        table = self.table
        number = version_by_rule(table, headers)
        if number is None:
            key = key_in_head(table, headers) if table.key else None
            if key is None:
                return self
            number = pick_sticky(table, key)
        route = self._fixed_routes.get(number)
        if route is None:
            route = self._fixed_routes[number] = FixedRoute(self, self.versions[number])
        return route

    def submit(self, job: Job) -> None:
        """Submit a job to the version of the key in its body, or else to a random version."""
        table = self.table
        key = key_in_body(table, job.body) if table.by else None
        number = draw(table, self._draw()) if key is None else pick_sticky(table, key)
        self.send(job, self.versions[number])

    def send(self, job: Job, version: ModelVersion) -> None:
        """Submit a job to a version, unless another one has the job's sequence."""
        if self._stateful:
            version = next(
                (stateful for stateful in self._stateful if stateful.has_sequence_of(job)), version
            )
        if version.client_timeout:
            deadline = job.arrived + version.client_timeout
            job.deadline = deadline if job.deadline is None else min(deadline, job.deadline)
        header = self._version_headers.get(version.version)
        # The version may have been removed or replaced since the headers were read.
        if header is None:
            version = self.versions[self.table.default]
            header = self._version_headers[version.version]
        job.route(version, header)
        if self.observers:
            self._wrap_for_observers(job, version)
        version.submit(job.watched or job)

    def leave(self, job: Job) -> None:
        if job.routed is not None:
            job.routed.leave(job.watched or job)

    def _wrap_for_observers(self, job: Job, version: ModelVersion) -> None:
        wrapped_job, number = job, self._draw()
        for observer in self.observers:
            if observer.should_observe(number):
                wrapped_job = observer.wrap_job(wrapped_job, version)
        if wrapped_job is not job:
            job.watched = wrapped_job


class FixedRoute:
    """The route of requests for which the headers have decided the version."""

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
