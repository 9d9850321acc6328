"""`ts.metrics.metric`."""

from tsx_runtime.worker.handler_api.metrics import Metric

__all__ = ["Metric"]
