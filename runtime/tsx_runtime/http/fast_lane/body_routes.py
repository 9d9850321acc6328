"""The route of requests whose body names the model, as in OpenAI's API.

Their model is looked up once the body has arrived.
"""

from __future__ import annotations

from tsx_runtime.api.urls import Target, resolve, with_model
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Headers, Job
from tsx_runtime.errors import TsxError
from tsx_runtime.wire import header_block


class BodyRoute:
    """A `Route` that finds the version, or the splitter, of each job."""

    client_timeout = 0.0  # The timeout of the model is set once it is known.
    name = version = ""  # fields of the access log, for a request that names no model

    def __init__(self, registry: Registry, target: Target, headers: Headers = ()) -> None:
        self._registry = registry
        self._target = target
        self._headers = headers

    def route_for_headers(self, headers: Headers) -> BodyRoute:
        return BodyRoute(self._registry, self._target, headers)

    def submit(self, job: Job) -> None:
        """Find the model that the body names, and submit the job to it."""
        registry, headers = self._registry, self._headers
        try:
            route = resolve(
                registry, with_model(registry, self._target, headers, job.body), headers
            )
        except TsxError as error:
            job.refuse(error)
            return
        job.destination = route
        # Headers that are hidden from unknown models, but not from this one.
        if visible_names := registry.hidden_headers.for_model(
            self.name
        ) - registry.hidden_headers.for_model(route.name):
            job.meta += header_block(pair for pair in headers if pair[0] in visible_names)
        if route.client_timeout:
            due = job.arrived + route.client_timeout
            job.deadline = due if job.deadline is None else min(due, job.deadline)
        route.submit(job)

    def leave(self, job: Job) -> None:
        """Do nothing: only a refused job still has this route."""
