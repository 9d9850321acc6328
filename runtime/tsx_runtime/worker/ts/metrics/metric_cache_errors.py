"""`ts.metrics.metric_cache_errors`."""

from tsx_runtime.worker.metrics import MetricsCacheKeyError

__all__ = ["MetricsCacheKeyError"]
