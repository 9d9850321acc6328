"""Object detection: label, box and score of each object in an image. Contract section 5.4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from tsx_runtime.worker.handlers.staging import stack_on_device, to_device
from tsx_runtime.worker.handlers.steps.image_processing import to_rgb, to_tensor
from tsx_runtime.worker.handlers.steps.timing import timed
from tsx_runtime.worker.handlers.vision import VisionHandler


def unscaled(image: Image.Image) -> torch.Tensor:
    """float32 of shape (3, height, width) in 0..1, in the size that the image has."""
    return to_tensor(to_rgb(image))


class ObjectDetector(VisionHandler):
    """For a model that takes images and gives for each `boxes`, `labels` and `scores`, as
    torchvision's do.

    Images of one size come as one tensor; of several sizes, and to a scripted model that wants it
    so, as a list of tensors.
    """

    threshold = 0.5
    image_processing = staticmethod(unscaled)

    def collate(self, tensors: Sequence[torch.Tensor]) -> Any:
        if _wants_list(self.model) or any(tensor.shape != tensors[0].shape for tensor in tensors):
            return to_device(list(tensors), self.device)
        return stack_on_device(tensors, self.device)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        # a scripted model gives its losses first
        return [self._things(things) for things in (data[1] if isinstance(data, tuple) else data)]

    def _things(self, things: Any) -> list[dict[str, Any]]:
        names = self.mapping or {}
        likely = things["scores"] >= self.threshold
        columns = (things[name][likely].tolist() for name in ("boxes", "labels", "scores"))
        return [
            {names.get(str(label), str(label)): box, "score": score}
            for box, label, score in zip(*columns, strict=True)
        ]


def _wants_list(model: Any) -> bool:
    """Whether the model is scripted for `List[Tensor]`, as torchvision's detectors are."""
    schema = getattr(getattr(model, "forward", None), "schema", None)
    return (
        schema is not None
        and len(schema.arguments) > 1
        and str(schema.arguments[1].type).startswith("List[")
    )
