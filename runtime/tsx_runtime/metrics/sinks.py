"""Metrics for plugins: at intervals each sink gets all metrics of `/metrics`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.metrics.exposition import Families
from tsx_runtime.plugins import MetricsSink, Sample

logger = logging.getLogger("tsx.plugins")


def samples_of(families: Families) -> list[Sample]:
    return [Sample(sample.name, metric.type, sample.labels, sample.value) for metric in families.collect() for sample in metric.samples]


async def feed(name: str, sink: MetricsSink, read: Callable[[], Awaitable[Families]], interval: float) -> None:
    """Runs until cancelled. A sink that is slow or fails delays no other, and is called again."""
    while True:
        await asyncio.sleep(interval)
        await feed_once(name, sink, read)


async def feed_once(name: str, sink: MetricsSink, read: Callable[[], Awaitable[Families]]) -> None:
    samples = samples_of(await read())
    try:
        await DaemonThreads(1, "metrics sinks").call(lambda: sink(samples))
    except Exception:  # the boundary to the plugin's code
        logger.exception("the metrics sink '%s' failed", name)
