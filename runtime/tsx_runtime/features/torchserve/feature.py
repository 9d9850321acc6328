"""The feature `torchserve`, which writes TorchServe's metric logs.

The `torchserve` command writes the snapshots; see `snapshots.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tsx_runtime.core.concurrency.periodic import repeat, running
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import Feature, ServerApp
from tsx_runtime.features.torchserve.metric_log import MetricLog
from tsx_runtime.shared.line_log import FLUSH_INTERVAL_S


class TorchServeFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self._log: MetricLog | None = None

    def add_routes(self, app: ServerApp) -> None:
        # The log reads the counts of responses, which all apps share.
        if not self._log and self.registry.settings.metrics_mode != "prometheus":
            self._log = MetricLog(self.registry, app.counts, app.context.system)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        if not self._log:
            yield
            return
        try:
            async with running(
                "metrics are no longer logged", repeat(FLUSH_INTERVAL_S, self._log.write)
            ):
                yield
        finally:
            await self._log.write()  # changes since the last interval
