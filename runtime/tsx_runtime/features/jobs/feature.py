"""The feature `jobs`, which stores requests and answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import Families, Feature, ServerApp
from tsx_runtime.features.jobs.executor import RequestExecutor
from tsx_runtime.features.jobs.metrics import add_jobs, read_jobs
from tsx_runtime.features.jobs.service import Jobs
from tsx_runtime.features.jobs.settings import JobsSettings
from tsx_runtime.settings.addresses import parse_address


class JobsFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.jobs: Jobs | None = None  # None if nothing is stored

    def open(self) -> None:
        from tsx_runtime.features.jobs.storage.location import make_store  # imports SQLite

        registry = self.registry
        settings = JobsSettings.of(registry.settings)
        store = make_store(settings, registry.state.directory)
        if store is None:
            return
        executor = RequestExecutor(registry, registry.settings.max_response_size, store.request)
        is_local = parse_address(registry.settings.inference_address).is_local
        self.jobs = Jobs(settings, store, executor, is_local=is_local)
        registry.on_readiness.append(self.jobs.runner.notify_change)

    def add_routes(self, app: ServerApp) -> None:
        from tsx_runtime.features.jobs.http.routes import add_job_routes

        add_job_routes(app, self.jobs)

    async def add_metrics(self, families: Families, host: str) -> None:
        if self.jobs:
            add_jobs(families, await read_jobs(self.jobs), host)

    def follow(self, seconds: float) -> None:
        if self.jobs:
            self.jobs.store.follow(seconds)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        if not self.jobs:
            yield
            return
        # All models are registered, so a stored request for an unknown model can be refused.
        await self.jobs.resume()
        try:
            yield
        finally:
            await self.jobs.close()

    def hand_over(self) -> None:
        if self.jobs:
            self.jobs.store.hand_over()

    async def stop(self, seconds: float, stop_now: asyncio.Event) -> None:
        if self.jobs:
            await self.jobs.stop(seconds, stop_now)
