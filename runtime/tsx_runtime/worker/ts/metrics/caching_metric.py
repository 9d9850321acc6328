"""`ts.metrics.caching_metric`."""

from tsx_runtime.worker.handler_api.metrics import CachingMetric

__all__ = ["CachingMetric"]
