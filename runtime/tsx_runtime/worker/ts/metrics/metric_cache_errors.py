"""`ts.metrics.metric_cache_errors`."""

from tsx_runtime.worker.exceptions import MetricsCacheKeyError, MetricsCacheTypeError, MetricsCacheValueError

__all__ = ["MetricsCacheKeyError", "MetricsCacheTypeError", "MetricsCacheValueError"]
