"""`ts.torch_handler.image_classifier`."""

from tsx_runtime.worker.handlers.image_classifier import ImageClassifier

__all__ = ["ImageClassifier"]
