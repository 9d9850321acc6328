"""`ts.metrics.dimension`."""

from tsx_runtime.worker.handler_api.metrics import Dimension

__all__ = ["Dimension"]
