"""Text generation in the preceding second, from the metrics `tsx_generation_*` that a handler
reports: for the charts of the web page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tsx_runtime.core.telemetry.histogram import SHOWN, quantile
from tsx_runtime.core.telemetry.version_stats import GENERATION, HandlerMetric, MetricKey

TIMES = ("time_to_first_token_seconds", "time_per_output_token_seconds")
COUNTERS = ("prompt_tokens_total", "tokens_total")
GAUGES = ("running_sequences", "waiting_sequences", "cache_use_ratio")


class GenerationSnapshot(NamedTuple):
    """The metrics at one moment, of all adapters and workers together; of the cache the fullest."""

    buckets: tuple[tuple[int, ...], ...]  # of each of TIMES
    counts: tuple[float, ...]  # of each of COUNTERS
    running: float
    waiting: float
    cache_use: float


class GenerationPoint(NamedTuple):
    """Times are in seconds, None where no sequence told one; rates are tokens a second."""

    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    prompt_tokens: float
    tokens: float
    running: float
    waiting: float
    cache_use: float  # from 0 to 1


def read_generation(metrics: Mapping[MetricKey, HandlerMetric]) -> GenerationSnapshot | None:
    """None for a model that generates no text."""
    found: dict[str, list[HandlerMetric]] = {}
    for (name, *_), metric in metrics.items():
        if name.startswith(GENERATION):
            found.setdefault(name[len(GENERATION) :], []).append(metric)
    if not found:
        return None
    none = (0,) * (len(SHOWN) + 1)
    buckets = (
        tuple(map(sum, zip(none, *(each.buckets for each in found.get(name, ())), strict=True)))
        for name in TIMES
    )
    counts = (sum(each.sum for each in found.get(name, ())) for name in COUNTERS)
    running, waiting, cache_use = (
        [each.last for each in found.get(name, ())] for name in GAUGES
    )  # of each worker's engine
    return GenerationSnapshot(
        tuple(buckets), tuple(counts), sum(running), sum(waiting), max(cache_use, default=0.0)
    )


def generation_between(
    before: GenerationSnapshot | None, after: GenerationSnapshot | None, seconds: float
) -> GenerationPoint | None:
    if after is None:
        return None
    times, rates = after.buckets, after.counts
    if before is not None:
        pairs = zip(after.buckets, before.buckets, strict=True)
        times = tuple(tuple(now - then for now, then in zip(*pair, strict=True)) for pair in pairs)
        rates = tuple(now - then for now, then in zip(after.counts, before.counts, strict=True))
    ttft, tpot = times
    prompt_tokens, tokens = (round(rate / seconds, 2) for rate in rates)
    return GenerationPoint(
        quantile(ttft, 0.5, SHOWN),
        quantile(ttft, 0.99, SHOWN),
        quantile(tpot, 0.5, SHOWN),
        quantile(tpot, 0.99, SHOWN),
        prompt_tokens,
        tokens,
        after.running,
        after.waiting,
        round(after.cache_use, 4),
    )
