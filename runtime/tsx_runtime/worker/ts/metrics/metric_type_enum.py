"""`ts.metrics.metric_type_enum`."""

from tsx_runtime.worker.handler_api.metrics import MetricTypes

__all__ = ["MetricTypes"]
