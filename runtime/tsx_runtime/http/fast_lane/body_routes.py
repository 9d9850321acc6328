"""The route of requests whose body names the model, as in OpenAI's API.

The model is looked up once the body is complete.
"""

from __future__ import annotations

from tsx_runtime.api.urls import Target, resolve, with_model
from tsx_runtime.core.hidden_credentials import tenant_header
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Headers, Job
from tsx_runtime.errors import TsxError
from tsx_runtime.wire import TENANT_HEADER, header_block


class BodyRoute:
    """A `Route` that looks up the version, or the splitter, for each job."""

    client_timeout = 0.0  # `submit` sets the deadline, once the model is known.
    name = version = ""  # fields of the access log, if the body names no model

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
        # `meta` was built for an unknown model. This adds the headers that only this model may see.
        hidden_names = registry.hidden_headers.for_model(route.name)
        if visible_names := registry.hidden_headers.for_model(self.name) - hidden_names:
            job.meta += header_block(pair for pair in headers if pair[0] in visible_names)
        if TENANT_HEADER in hidden_names:
            job.meta += header_block([tenant_header(headers)])
        if route.client_timeout:
            expires_at = job.arrived + route.client_timeout
            job.deadline = expires_at if job.deadline is None else min(expires_at, job.deadline)
        route.submit(job)

    def leave(self, job: Job) -> None:
        """Do nothing, because only a refused job still has this route."""
