"""The handler that returns the most likely classes of an image, with their probabilities."""

from __future__ import annotations

from typing import Any

import torch

from tsx_runtime.worker.handlers.steps.image_processing import imagenet
from tsx_runtime.worker.handlers.steps.labels import map_class_to_label
from tsx_runtime.worker.handlers.steps.timing import timed
from tsx_runtime.worker.handlers.vision import VisionHandler


class ImageClassifier(VisionHandler):
    """A handler for models that return logits for a batch of images.

    The model takes float32 of shape (batch, 3, 224, 224), prepared as for ImageNet, and returns
    logits of shape (batch, classes). Images of any mode are converted to RGB first.

    Attributes:
        topk: The number of classes in a response.
        image_processing: Converts a Pillow image to float32 of shape (3, 224, 224).
    """

    topk = 5
    image_processing = staticmethod(imagenet)

    def set_max_result_classes(self, topk: int) -> None:
        """Set the number of classes in a response."""
        self.topk = topk

    def get_max_result_classes(self) -> int:
        """Return the number of classes in a response."""
        return self.topk

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Return the most likely classes of each image.

        Args:
            data: Logits of shape (batch, classes).

        Returns:
            For each image a dict from the name of a class to its probability, the likeliest first.
            A class without a name has its number as str.
        """
        probabilities, classes = torch.softmax(data, dim=1).topk(
            min(self.topk, data.shape[1]), dim=1
        )
        return list(map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist()))
