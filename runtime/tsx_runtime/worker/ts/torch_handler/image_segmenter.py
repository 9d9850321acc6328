"""`ts.torch_handler.image_segmenter`."""

from tsx_runtime.worker.handlers.image_segmenter import ImageSegmenter

__all__ = ["ImageSegmenter"]
