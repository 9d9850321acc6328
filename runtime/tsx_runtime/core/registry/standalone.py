"""A model without a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.settings.schema import Settings


@asynccontextmanager
async def open_model(
    path: Path,
    settings: Settings,
    *,
    workers: int = 1,
    batch_size: int | None = None,
    handler: str | None = None,
) -> AsyncIterator[ModelVersion]:
    """Open an archive or directory without a server, with `workers` ready workers.

    It raises the same errors as `Registry.register_path`.
    """
    registry = Registry(settings)
    registry.warm_up([path])
    order = RegisterOrder(
        url=path.name,
        handler=handler,
        batch_size=batch_size,
        initial_workers=workers,
        loaded_at_startup=True,
        must_load=True,
        # A queue size excludes a latency target of the archive, which would refuse requests.
        job_queue_size=settings.job_queue_size,
    )
    try:
        yield await registry.register_path(path, order)
    finally:
        await registry.close()
