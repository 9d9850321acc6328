"""The interface by which a rollout reads the quality and drift of versions."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from tsx_runtime.core.comparison.means import MetricCounts

Metric = Literal["accuracy", "mean_error"]
# The smallest difference that matters: in accuracy, and as a part of the old mean error.
RELEVANT_DIFFERENCES: dict[Metric, float] = {"accuracy": 0.01, "mean_error": 0.05}


class VersionQuality(NamedTuple):
    """What is known about the answers of a version since a time."""

    accuracy: MetricCounts = MetricCounts()  # 1 for a right answer, 0 for a wrong one
    error: MetricCounts = MetricCounts()  # absolute errors of numbers
    drift: float | None = None  # the largest population stability index in the last window
    windows: int = 0  # windows of the version that were compared


class QualitySource(Protocol):
    """A feature that knows the quality of versions; `Registry.quality_source` has it.

    It is an interface because rollouts must not import the feature.
    """

    def quality_of(self, model: str, version: str, since: float) -> VersionQuality | None:
        """Return what is known about answers since a time in seconds since 1970.

        The first call for a version returns None and starts to read; a later call returns the last
        result. It must not block.
        """

    def is_monitored(self, model: str) -> bool:
        """Tell whether samples of the model's requests are taken."""
