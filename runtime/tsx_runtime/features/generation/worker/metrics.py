"""The metrics of text generation. Metrics of tokens have the adapter as a label.

Each request reports its metrics at its end. While it runs, it reports the engine's metrics from
time to time.
"""

from __future__ import annotations

import time

from tsx_runtime.features.generation.worker.interface import EngineStats
from tsx_runtime.worker.handler_api.metrics import Dimension, Metrics, MetricTypes

ENGINE_INTERVAL_S = 1.0  # the time between two reports of a busy engine


class TokenTimes:
    """The times of one sequence's tokens, as `time.monotonic()`."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.first_token_at = self.last_token_at = 0.0
        self.tokens = self.first_tokens = self.cached_tokens = 0

    def record(self, tokens: int, cached_tokens: int) -> None:
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
        if timing.tokens:
            for name, tokens in (
                ("tsx_generation_prompt_tokens_total", prompt),
                ("tsx_generation_cached_tokens_total", timing.cached_tokens),
                ("tsx_generation_tokens_total", timing.tokens),
            ):
                self._metrics.add_counter(name, tokens, dimensions=labels)
            times = {
                "tsx_generation_time_to_first_token_seconds": timing.first_token_at
                - timing.started_at
            }
            if later_tokens := timing.tokens - timing.first_tokens:
                duration_s = timing.last_token_at - timing.first_token_at
                times["tsx_generation_time_per_output_token_seconds"] = duration_s / later_tokens
            for name, seconds in times.items():
                self._metrics.add_time(name, seconds, None, "s", labels, MetricTypes.HISTOGRAM)
        self.report_engine(stats)

    def report_engine(self, stats: EngineStats) -> None:
        self.engine_reported_at = time.monotonic()
        if self._metrics is not None:
            for name, value in (
                ("tsx_generation_running_sequences", stats.running),
                ("tsx_generation_waiting_sequences", stats.waiting),
                ("tsx_generation_cache_use_ratio", round(stats.cache_use, 4)),
            ):
                self._metrics.add_metric(
                    name, value, "count", None, [self._worker], MetricTypes.GAUGE
                )
