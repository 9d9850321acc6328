"""`ts.service`."""

from tsx_runtime.worker.exceptions import PredictionException

__all__ = ["PredictionException"]
