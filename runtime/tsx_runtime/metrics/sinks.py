"""The tasks that measure the machine and pass metrics to plugins' sinks."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial

from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.core.concurrency.periodic import repeat, running
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.metrics.collection import reader
from tsx_runtime.metrics.exposition import Families
from tsx_runtime.metrics.host import System
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.plugins import MetricsSink, Sample
from tsx_runtime.plugins.api import PUSH_INTERVAL_S


def metric_tasks(
    registry: Registry, counts: ResponseCounts, system: System, sinks: Mapping[str, MetricsSink]
) -> AbstractAsyncContextManager[None]:
    """Return a context in which the machine is measured and the sinks get all metrics."""
    read = reader(registry, counts, system)
    return running(
        "metrics are no longer logged",
        system.follow(),
        *(
            repeat(PUSH_INTERVAL_S, partial(feed_once, name, sink, read))
            for name, sink in sinks.items()
        ),
    )


async def feed_once(name: str, sink: MetricsSink, read: Callable[[], Awaitable[Families]]) -> None:
    """Pass all metrics of `/metrics` to a plugin's sink.

    Each sink has a thread of its own, so a slow one delays no other. A sink that fails is called
    again.
    """
    families = await read()
    samples = [
        Sample(sample.name, metric.type, sample.labels, sample.value)
        for metric in families.collect()
        for sample in metric.samples
    ]
    try:
        await DaemonThreads(1, "metrics sinks").call(lambda: sink(samples))
    except Exception:  # the boundary to the plugin's code
        logging.getLogger("tsx.plugins").exception("the metrics sink '%s' failed", name)
