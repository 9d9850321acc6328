"""The route of requests whose body names their model, as in OpenAI's API: what is to be known of it
is found once the body is there.
"""

from __future__ import annotations

from tsx_runtime.api.urls import Target, resolve, with_model
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Headers, Job
from tsx_runtime.errors import TsxError
from tsx_runtime.wire import header_block


class BodyRoute:
    """A `Route` that finds the version, or the splitter, of each job."""

    client_timeout = 0.0  # the model's own is set with its route
    name = version = ""  # of the model, in the access log: of a request that names none

    def __init__(self, registry: Registry, target: Target, headers: Headers = ()) -> None:
        self._registry = registry
        self._target = target
        self._headers = headers

    def by_head(self, headers: Headers) -> BodyRoute:
        return BodyRoute(self._registry, self._target, headers)

    def submit(self, job: Job) -> None:
        registry, headers = self._registry, self._headers
        try:
            route = resolve(
                registry, with_model(registry, self._target, headers, job.body), headers
            )
        except TsxError as error:
            job.refuse(error)
            return
        job.destination = route
        if passed := registry.hidden_headers.of(self.name) - registry.hidden_headers.of(
            route.name
        ):  # that this model gets
            job.meta += header_block(pair for pair in headers if pair[0] in passed)
        if route.client_timeout:
            due = job.arrived + route.client_timeout
            job.deadline = due if job.deadline is None else min(due, job.deadline)
        route.submit(job)

    def leave(self, job: Job) -> None:
        """The client of a refused job is gone; there is nothing to cancel."""
