"""The feature `sequences`, which dispatches the requests of stateful models."""

from __future__ import annotations

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.feature import Feature
from tsx_runtime.features.sequences.dispatcher import JoiningSequenceDispatcher, SequenceDispatcher


class SequencesFeature(Feature):
    def dispatcher(self, version: ModelVersion) -> SequenceDispatcher | None:
        plan = version.plan
        if plan.strategy.sequences is None:
            return None
        joins_running = plan.strategy.mode != "batch"
        return (JoiningSequenceDispatcher if joins_running else SequenceDispatcher)(
            version.label, plan.limits, plan.bounds, plan.strategy.sequences
        )
