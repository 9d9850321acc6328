"""The metrics of text generation; those of tokens are reported by adapter.

Each request reports its metrics at its end, and now and then those of the engine.
"""

from __future__ import annotations

import time

from tsx_runtime.worker.generation.interface import EngineStats
from tsx_runtime.worker.handler_api.metrics import Dimension, Metrics, MetricTypes

TIME_TO_FIRST_TOKEN = "tsx_generation_time_to_first_token_seconds"
TIME_PER_TOKEN = "tsx_generation_time_per_output_token_seconds"
PROMPT, GENERATED = "tsx_generation_prompt_tokens_total", "tsx_generation_tokens_total"
RUNNING, WAITING, CACHE = (
    "tsx_generation_running_sequences",
    "tsx_generation_waiting_sequences",
    "tsx_generation_cache_use_ratio",
)

ENGINE_INTERVAL_S = 1.0  # between two reports of an engine that generates


class TokenTimes:
    """The times of one sequence's tokens, by `time.monotonic`."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first = self.last = 0.0
        self.tokens = self.first_tokens = 0

    def note(self, tokens: int) -> None:
        self.last = time.monotonic()
        self.tokens += tokens
        if not self.first:
            self.first, self.first_tokens = self.last, tokens


class GenerationMetrics:
    """The metrics of a worker that generates text."""

    def __init__(self, metrics: Metrics | None, worker: str) -> None:
        self._metrics = metrics
        self._worker = Dimension("worker", worker)
        self.engine_reported_at = 0.0  # time.monotonic()

    def report(
        self, adapter: str | None, prompt: int, timing: TokenTimes, stats: EngineStats
    ) -> None:
        """Report a sequence that has ended; the label of the base model is empty."""
        if self._metrics is None:
            return
        labels = [Dimension("adapter", adapter or "")]
        seconds = {TIME_TO_FIRST_TOKEN: timing.first - timing.began} if timing.tokens else {}
        if (later_tokens := timing.tokens - timing.first_tokens) > 0:
            seconds[TIME_PER_TOKEN] = (timing.last - timing.first) / later_tokens
        if timing.tokens:
            self._metrics.add_counter(PROMPT, prompt, dimensions=labels)
            self._metrics.add_counter(GENERATED, timing.tokens, dimensions=labels)
        for name, value in seconds.items():
            self._metrics.add_time(name, value, None, "s", labels, MetricTypes.HISTOGRAM)
        self.report_engine(stats)

    def report_engine(self, stats: EngineStats) -> None:
        self.engine_reported_at = time.monotonic()
        if self._metrics is not None:
            for name, value in (
                (RUNNING, stats.running),
                (WAITING, stats.waiting),
                (CACHE, round(stats.cache_use, 4)),
            ):
                self._metrics.add_metric(
                    name, value, "count", None, [self._worker], MetricTypes.GAUGE
                )
