"""The apps and routes of jobs on a listener."""

from __future__ import annotations

from functools import partial
from typing import Any

from tsx_runtime.api.messages import App, Receive, Scope, Send, without_headers
from tsx_runtime.api.urls import runs_model
from tsx_runtime.features.jobs.http import precomputed, queue
from tsx_runtime.features.jobs.http.idempotency import Idempotency, has_key
from tsx_runtime.features.jobs.http.jobs import JobRoutes, is_async_request, is_job_path, job_path
from tsx_runtime.features.jobs.service import Jobs
from tsx_runtime.features.jobs.settings import JobsSettings
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.page import PAGE_CREDENTIALS, check_page, is_page_prediction, use_model_path


class PlaygroundJobs(JobRoutes):
    """The job routes of the page's playground, with the same checks as `Playground`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        use_model_path(scope)
        await super().__call__(scope, receive, send)

    async def _accept(self, scope: Scope, receive: Receive, request_id: bytes) -> Any:
        check_page(scope)
        return await super()._accept(without_headers(scope, PAGE_CREDENTIALS), receive, request_id)


def add_job_routes(app: ServerApp, jobs: Jobs | None) -> None:
    """Add the jobs of a server to a listener; `jobs` is None if it stores nothing."""
    context = app.context
    settings, guards, registry = context.settings, context.guards, context.registry
    max_job_size = JobsSettings.of(settings).max_job_size or settings.max_request_size
    if "inference" in app.roles:
        idempotency = Idempotency(
            None if jobs is None else jobs.keyed_runs,
            settings.max_request_size,
            max_job_size,
            guards.inference,
            app.counts,
            registry.hidden_headers.exposed_credential_headers,
            app.is_confined,
        )

        def wrap(inner: App, scope: Scope) -> App:
            return partial(idempotency, inner) if has_key(scope) else inner

        app.wrappers.append(wrap)
    if jobs is None:
        if "management" in app.roles:
            app.add_routes(queue.build_closed_router())
        return
    if "inference" not in app.roles and "management" not in app.roles:
        return
    guard = guards.inference if "inference" in app.roles else guards.management
    if "management" in app.roles:
        app.add_routes(queue.build_router(jobs, guards.management))
        guard = guard and guard._replace(second_key=context.keys.management)
        page_jobs = PlaygroundJobs(
            jobs, registry, max_job_size, guards.management, app.counts, app.is_confined
        )
        app.apps.append(
            (lambda scope: is_page_prediction(scope) and is_async_request(scope), page_jobs)
        )
    routes = JobRoutes(jobs, registry, max_job_size, guard, app.counts, app.is_confined)
    app.apps.append((lambda scope: is_job_path(scope["path"]), routes))
    app.document(job_path())
    if "inference" in app.roles:
        app.model_apps.append(
            (lambda scope: runs_model(scope["path"]) and is_async_request(scope), routes)
        )
        router = precomputed.build_router(jobs, is_confined=app.is_confined)
        app.add_routes(router, {"predictions": guards.inference})
