"""The feature `huggingface`, with the defaults of its handlers and the models of the Hub."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from tsx_archiver import BUILTIN_HANDLERS, OpenArchive
from tsx_archiver.metadata.huggingface import (
    GENERATION_HANDLER,
    HANDLER,
    MANIFEST_KEY,
    weights_size,
)
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import HandlerDefaults, RegisterOrder
from tsx_runtime.core.registry.downloads import Downloads
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.strategies import EntryPoint
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.errors import BadRequest
from tsx_runtime.feature import Feature, ServerApp
from tsx_runtime.features.huggingface.adapters import Adapters
from tsx_runtime.features.huggingface.hub import Progress, check_allowed, open_hub, parse_hub
from tsx_runtime.features.huggingface.settings import HuggingFaceSettings
from tsx_runtime.shared.cores import cpu_count
from tsx_runtime.sources import Trust, is_hub

PACKAGE = ("transformers", "transformers")
DEFAULT_BATCH_SIZE = 32
# The limit for a task on a CPU. Several workers with one thread each have a higher throughput
# than a single worker with several threads.
MAX_TASK_WORKERS = 4
# Larger models have one worker by default, since a worker that changes the precision copies the
# weights.
MAX_TASK_WEIGHT_BYTES = 1 << 30


class HuggingFaceFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self._adapters = Adapters(registry)

    def add_routes(self, app: ServerApp) -> None:
        if "management" in app.roles:
            from tsx_runtime.features.huggingface import routes  # imports FastAPI

            routes.add_routes(app, self._adapters)

    @asynccontextmanager
    async def loading(self, version: ModelVersion, worker: Worker) -> AsyncIterator[None]:
        yield
        instance = worker.successor or worker.instance
        if instance is not None:
            await self._adapters.load_into(version, instance.channel)

    def describe(self, version: ModelVersion) -> Mapping[str, object]:
        return {"added_adapters": version.added_adapters or None}

    def end_version(self, version: ModelVersion) -> None:
        self._adapters.forget(version)

    @property
    def named_models(self) -> Collection[str]:
        return HuggingFaceSettings.of(self.registry.settings).trust_remote_code

    def handler_defaults(
        self, name: str, handler: str, archive: OpenArchive
    ) -> HandlerDefaults | None:
        if handler == GENERATION_HANDLER:
            return HandlerDefaults(is_async=True, package=PACKAGE)
        if handler != HANDLER:
            return None
        # A model's own code may mix the rows of a batch.
        limits = {} if name in self.named_models else {"batch_size": DEFAULT_BATCH_SIZE}
        cores = self.registry.settings.cpus or cpu_count()
        return HandlerDefaults(
            limits, task_workers(weights_size(archive.directory), cores), package=PACKAGE
        )

    def around(self, version: ModelVersion, entry: EntryPoint) -> EntryPoint | None:
        if version.handler == GENERATION_HANDLER:
            self._adapters.restore(version)
            # Requests take the usual way; their prompts share a cache only within a tenant.
            self.registry.hidden_headers.separate_tenants(version.name)
        return None

    def handler_properties(self, model: str) -> Mapping[str, Any]:
        settings = self.registry.settings
        return {
            "trust_remote_code": model in self.named_models,
            "media_urls": (
                settings.allowed_urls,
                settings.allow_private_urls,
                settings.s3_endpoint_url,
            ),
        }

    async def open_url(
        self, order: RegisterOrder, trust: Trust, downloads: Downloads, progress: Progress
    ) -> tuple[OpenArchive, RegisterOrder] | None:
        if not is_hub(order.url):
            return None
        settings, model = self.registry.settings, parse_hub(order.url)
        if trust is Trust.CLIENT:
            check_allowed(model, settings.allowed_urls)
        # Any other handler could be code in the model's directory, which is not trusted.
        if order.handler is not None and order.handler not in BUILTIN_HANDLERS:
            raise BadRequest(
                f"The handler of {model} must be one that comes with tsx. With another: tsx archive"
                f" {model} --handler FILE."
            )
        archive = await downloads.call(
            partial(open_hub, model, settings, progress, downloads.closed.is_set), OpenArchive.close
        )
        commit = str(archive.manifest.data[MANIFEST_KEY]["revision"])
        return archive, replace(order, url=str(model._replace(revision=commit)))


def task_workers(weights: int, cores: int) -> int | None:
    """Return the default number of workers of a task on a CPU; None for a large model."""
    return min(cores, MAX_TASK_WORKERS) if weights <= MAX_TASK_WEIGHT_BYTES else None
