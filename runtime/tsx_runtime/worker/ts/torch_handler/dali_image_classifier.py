"""`ts.torch_handler.dali_image_classifier`."""

from tsx_runtime.worker.handlers.dali import DALIHandler, DALIImageClassifier

__all__ = ["DALIHandler", "DALIImageClassifier"]
