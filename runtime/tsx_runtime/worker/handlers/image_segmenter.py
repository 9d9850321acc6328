"""The handler that returns the class of each pixel of an image, with its probability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tsx_runtime.worker.handlers.steps.image_processing import imagenet
from tsx_runtime.worker.handlers.steps.timing import timed
from tsx_runtime.worker.handlers.vision import VisionHandler


class ImageSegmenter(VisionHandler):
    """A handler for models with the interface of torchvision's segmentation models.

    The model takes float32 of shape (batch, 3, 224, 224), prepared as for ImageNet. It returns
    logits of shape (batch, classes, height, width), alone or under the key `out`
    (https://pytorch.org/vision/stable/models.html#semantic-segmentation).
    """

    image_processing = staticmethod(imagenet)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Return the likeliest class of each pixel.

        Args:
            data: Logits of shape (batch, classes, height, width), or a mapping with them as `out`.

        Returns:
            For each image nested lists of shape (height, width, 2): the number of the class as a
            float, and its probability.
        """
        scores = data["out"] if isinstance(data, Mapping) else data
        probabilities, classes = torch.softmax(scores, dim=1).max(dim=1)
        result: list[Any] = torch.stack(
            [classes.to(probabilities.dtype), probabilities], dim=-1
        ).tolist()
        return result
