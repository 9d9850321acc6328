"""`ts.torch_handler.vision_handler`."""

from tsx_runtime.worker.handlers.vision import VisionHandler

__all__ = ["VisionHandler"]
