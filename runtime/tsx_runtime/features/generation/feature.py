"""The feature `generation`, which knows the requests that wait for room in an engine."""

from __future__ import annotations

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.telemetry.version_stats import GENERATION
from tsx_runtime.feature import Feature


class GenerationFeature(Feature):
    def waiting(self, version: ModelVersion) -> int:
        # The metric has one value for each worker's engine.
        return int(
            sum(
                metric.last
                for (name, *_), metric in version.stats.handler_metrics.items()
                if name == f"{GENERATION}waiting_sequences"
            )
        )
