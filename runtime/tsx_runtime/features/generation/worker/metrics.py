"""The metrics of text generation. Metrics of tokens have the adapter as a label.

Each request reports its metrics at its end. While it runs, it reports the engine's metrics from
time to time.
"""

from __future__ import annotations

import time

from tsx_runtime.features.generation.worker.interface import EngineStats
from tsx_runtime.worker.handler_api.metrics import Dimension, Metrics, MetricTypes

TIME_TO_FIRST_TOKEN = "tsx_generation_time_to_first_token_seconds"
TIME_PER_TOKEN = "tsx_generation_time_per_output_token_seconds"
PROMPT_TOKENS, CACHED_TOKENS, GENERATED_TOKENS = (
    "tsx_generation_prompt_tokens_total",
    "tsx_generation_cached_tokens_total",
    "tsx_generation_tokens_total",
)
RUNNING_SEQUENCES, WAITING_SEQUENCES, CACHE_USE = (
    "tsx_generation_running_sequences",
    "tsx_generation_waiting_sequences",
    "tsx_generation_cache_use_ratio",
)

ENGINE_INTERVAL_S = 1.0  # the time between two reports of a busy engine


class TokenTimes:
    """The times of one sequence's tokens, as `time.monotonic()`."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.first_token_at = self.last_token_at = 0.0
        self.tokens = self.first_tokens = self.cached_tokens = 0

    def record(self, tokens: int, cached_tokens: int = 0) -> None:
        self.cached_tokens += cached_tokens
        self.last_token_at = time.monotonic()
        self.tokens += tokens
        if not self.first_token_at:
            self.first_token_at, self.first_tokens = self.last_token_at, tokens


class GenerationMetrics:
    """The metrics of a worker that generates text."""

    def __init__(self, metrics: Metrics | None, worker: str) -> None:
        self._metrics = metrics
        self._worker = Dimension("worker", worker)
        self.engine_reported_at = 0.0  # time.monotonic()

    def report(
        self, adapter: str | None, prompt: int, timing: TokenTimes, stats: EngineStats
    ) -> None:
        """Report a complete sequence. For the base model, the adapter's label is empty."""
        if self._metrics is None:
            return
        labels = [Dimension("adapter", adapter or "")]
        seconds = (
            {TIME_TO_FIRST_TOKEN: timing.first_token_at - timing.started_at}
            if timing.tokens
            else {}
        )
        if (later_tokens := timing.tokens - timing.first_tokens) > 0:
            seconds[TIME_PER_TOKEN] = (timing.last_token_at - timing.first_token_at) / later_tokens
        if timing.tokens:
            self._metrics.add_counter(PROMPT_TOKENS, prompt, dimensions=labels)
            self._metrics.add_counter(CACHED_TOKENS, timing.cached_tokens, dimensions=labels)
            self._metrics.add_counter(GENERATED_TOKENS, timing.tokens, dimensions=labels)
        for name, value in seconds.items():
            self._metrics.add_time(name, value, None, "s", labels, MetricTypes.HISTOGRAM)
        self.report_engine(stats)

    def report_engine(self, stats: EngineStats) -> None:
        self.engine_reported_at = time.monotonic()
        if self._metrics is not None:
            for name, value in (
                (RUNNING_SEQUENCES, stats.running),
                (WAITING_SEQUENCES, stats.waiting),
                (CACHE_USE, round(stats.cache_use, 4)),
            ):
                self._metrics.add_metric(
                    name, value, "count", None, [self._worker], MetricTypes.GAUGE
                )
