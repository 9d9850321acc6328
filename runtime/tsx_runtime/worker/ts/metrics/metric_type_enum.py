"""`ts.metrics.metric_type_enum`."""

from tsx_runtime.worker.metrics import MetricTypes

__all__ = ["MetricTypes"]
