"""`ts.metrics.caching_metric`."""

from tsx_runtime.worker.metrics import CachingMetric

__all__ = ["CachingMetric"]
