"""`ts.metrics.metric`."""

from tsx_runtime.worker.metrics import Metric

__all__ = ["Metric"]
