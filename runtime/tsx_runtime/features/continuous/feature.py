"""The feature `continuous`, whose workers run the loop in `loop.py`."""

from __future__ import annotations

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.joining import JoiningDispatcher
from tsx_runtime.feature import Feature


class ContinuousFeature(Feature):
    def dispatcher(self, version: ModelVersion) -> JoiningDispatcher | None:
        plan = version.plan
        # Sequences have a dispatcher of their own, also with continuous batching.
        if plan.strategy.mode != "continuous" or plan.strategy.sequences is not None:
            return None
        return JoiningDispatcher(version.label, plan.limits, plan.bounds)
