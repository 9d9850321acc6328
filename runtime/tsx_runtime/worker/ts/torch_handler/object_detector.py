"""`ts.torch_handler.object_detector`."""

from tsx_runtime.worker.handlers.object_detector import ObjectDetector

__all__ = ["ObjectDetector"]
