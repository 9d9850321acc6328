"""`ts.torch_handler.text_classifier`."""

from tsx_runtime.worker.handlers.text_classifier import TextClassifier

__all__ = ["TextClassifier"]
