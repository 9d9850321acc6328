"""Text generation in the last second, for the charts of the web page.

It is computed from the metrics `tsx_generation_*` that a handler reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tsx_runtime.core.telemetry.histogram import SHOWN_BOUNDS, quantile
from tsx_runtime.core.telemetry.version_stats import GENERATION, HandlerMetric, MetricKey

TIMES = ("time_to_first_token_seconds", "time_per_output_token_seconds")
COUNTERS = ("prompt_tokens_total", "tokens_total")
GAUGES = ("running_sequences", "waiting_sequences", "cache_use_ratio")


class GenerationSnapshot(NamedTuple):
    """The metrics at one moment: sums over adapters and workers, but the largest `cache_use`."""

    buckets: tuple[tuple[int, ...], ...]  # parallel to TIMES
    counts: tuple[float, ...]  # parallel to COUNTERS
    running: float
    waiting: float
    cache_use: float


class GenerationPoint(NamedTuple):
    """One second: times in seconds (None without a sequence), and rates in tokens per second."""

    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    prompt_tokens: float
    tokens: float
    running: float
    waiting: float
    cache_use: float  # 0 to 1


def read_generation(metrics: Mapping[MetricKey, HandlerMetric]) -> GenerationSnapshot | None:
    """Return the metrics, or None if the model does not generate text."""
    by_name: dict[str, list[HandlerMetric]] = {}
    for (name, *_), metric in metrics.items():
        if name.startswith(GENERATION):
            by_name.setdefault(name[len(GENERATION) :], []).append(metric)
    if not by_name:
        return None
    zeros = (0,) * (len(SHOWN_BOUNDS) + 1)
    buckets = (
        tuple(
            map(sum, zip(zeros, *(metric.buckets for metric in by_name.get(name, ())), strict=True))
        )
        for name in TIMES
    )
    counts = (sum(metric.sum for metric in by_name.get(name, ())) for name in COUNTERS)
    # The metrics have one value for each worker's engine.
    running, waiting, cache_use = (
        [metric.last for metric in by_name.get(name, ())] for name in GAUGES
    )
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
        times = tuple(tuple(new - old for new, old in zip(*pair, strict=True)) for pair in pairs)
        rates = tuple(new - old for new, old in zip(after.counts, before.counts, strict=True))
    ttft, tpot = times
    prompt_tokens, tokens = (round(rate / seconds, 2) for rate in rates)
    return GenerationPoint(
        quantile(ttft, 0.5, SHOWN_BOUNDS),
        quantile(ttft, 0.99, SHOWN_BOUNDS),
        quantile(tpot, 0.5, SHOWN_BOUNDS),
        quantile(tpot, 0.99, SHOWN_BOUNDS),
        prompt_tokens,
        tokens,
        after.running,
        after.waiting,
        round(after.cache_use, 4),
    )
