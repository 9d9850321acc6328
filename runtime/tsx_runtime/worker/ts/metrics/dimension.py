"""`ts.metrics.dimension`."""

from tsx_runtime.worker.metrics import Dimension

__all__ = ["Dimension"]
