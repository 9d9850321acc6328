"""The most likely classes of an image, with their probabilities. Contract section 5.4."""

from __future__ import annotations

from typing import Any

import torch

from tsx_runtime.worker.handlers.steps.image_processing import imagenet
from tsx_runtime.worker.handlers.steps.labels import map_class_to_label
from tsx_runtime.worker.handlers.steps.timing import timed
from tsx_runtime.worker.handlers.vision import VisionHandler


class ImageClassifier(VisionHandler):
    """For a model that takes (batch, 3, 224, 224) and gives logits; images of any mode are made RGB
    first.
    """

    topk = 5
    image_processing = staticmethod(imagenet)

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        probabilities, classes = torch.softmax(data, dim=1).topk(
            min(self.topk, data.shape[1]), dim=1
        )
        return list(map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist()))
