"""The class of each pixel of an image, with its probability. Contract section 5.4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tsx_runtime.worker.handlers.steps.image_processing import imagenet
from tsx_runtime.worker.handlers.steps.timing import timed
from tsx_runtime.worker.handlers.vision import VisionHandler


class ImageSegmenter(VisionHandler):
    """For a model that takes (batch, 3, 224, 224) and gives (batch, classes, height, width), alone
    or as `out`, as torchvision's do.
    """

    image_processing = staticmethod(imagenet)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        scores = data["out"] if isinstance(data, Mapping) else data
        probabilities, classes = torch.softmax(scores, dim=1).max(dim=1)
        result: list[Any] = torch.stack(
            [classes.to(probabilities.dtype), probabilities], dim=-1
        ).tolist()
        return result
