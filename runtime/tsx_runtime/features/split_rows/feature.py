"""The feature `split_rows`, which dispatches the parts of large requests."""

from __future__ import annotations

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.strategies import queue_of
from tsx_runtime.feature import Feature
from tsx_runtime.features.split_rows.dispatcher import RowsDispatcher


class SplitRowsFeature(Feature):
    def dispatcher(self, version: ModelVersion) -> RowsDispatcher | None:
        plan = version.plan
        rows = plan.strategy.split_rows
        if not rows:
            return None
        return RowsDispatcher(
            version.label,
            plan.limits,
            plan.bounds,
            rows,
            version.max_response_size,
            queue_of(plan.strategy),
        )
